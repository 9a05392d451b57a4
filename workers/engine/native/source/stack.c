/* A model's layers, as many one after the other as are wanted, in one call: the same kernels in the same order as
   layers/stack.py has them called one by one, with nothing but buffers between them. Layers may differ in heads and
   widths. Activations, norms and rotations are all in bf16, or all in float; matrices and the cache may be in 16 bits
   under float. */

#define _DEFAULT_SOURCE /* of clocks */

#include <string.h>
#include <time.h>

#include "kernels.h"

enum { MATRIX, ATTENTION, NORMS, PARTS };

typedef struct {
    norm_weights attention_norm, mlp_norm;               /* of what the parts read; of the sums if norms come behind */
    norm_weights attention_result_norm, mlp_result_norm; /* of what the parts add */
    norm_weights query_norm, key_norm;                   /* of heads */
    norm_weights query_row_norm, key_row_norm;           /* of all heads together, before that */
    const packed_matrix *qkv, *output, *up, *down;
    uint32_t *cache;
    const float *sinks;            /* [heads]; NULL for none */
    float scale, soft_cap, factor; /* no cap: 0; the factor of what the parts add */
    int32_t step, rotation;        /* which are its own: layers that attend alike share a step */
    int32_t queries, keys;         /* numbers of a token; no keys: those of another layer are read */
    int32_t parallel;       /* whether both parts read the layer's input, the MLP with a norm of its own if there is one */
} decoder_layer;

typedef struct {
    const decoder_layer *layers;
    norm_weights norm; /* behind the last layer, unless norms come behind each part */
    int32_t post_norm; /* whether they do */
    int32_t num_layers, hidden; /* the latter: numbers of a token */
    int32_t mlp_rows;           /* tokens that go through an MLP together */
    int32_t floats;             /* whether numbers are float instead of bf16 */
    int32_t threads;
    const int32_t *interrupted; /* not 0: end at the next layer; NULL: never */
    double seconds[PARTS];      /* spent so far, for those who profile */
} decoder_stack;

typedef struct {
    const attention_step *const *steps;
    const head_rotation *rotations; /* NULL for none */
    const int64_t *needed; /* this and the rest: as run_stack has them */
    ptrdiff_t num_needed, tokens;
    char *x, *y, *narrow, *wide;
    const char *residual; /* y, or NULL before the first layer */
    double since;
    int failed; /* whether there was no memory for a product */
} stack_pass;

int run_stack(decoder_stack *stack, ptrdiff_t first, ptrdiff_t end, const attention_step *const *steps,
              const head_rotation *rotations, const int64_t *needed, ptrdiff_t num_needed, ptrdiff_t tokens, void *x,
              void *y, void *narrow, void *wide);

/* Bytes of `count` numbers. */
static ptrdiff_t bytes(const decoder_stack *stack, ptrdiff_t count) {
    return count * (stack->floats ? 4 : 2);
}

static double now(void) {
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return (double)time.tv_sec + 1e-9 * (double)time.tv_nsec;
}

static void count(decoder_stack *stack, stack_pass *pass, int part) {
    double time = now();
    stack->seconds[part] += time - pass->since;
    pass->since = time;
}

/* x becomes x + residual, and y its norm; y may be the residual's place, or x. */
static void add_norm(decoder_stack *stack, stack_pass *pass, const norm_weights *norm, char *x, const char *residual,
                     char *y) {
    norm_rows(x, residual, norm, y, pass->tokens, stack->hidden, stack->hidden, stack->floats, stack->threads);
    count(stack, pass, NORMS);
}

static void add(decoder_stack *stack, stack_pass *pass, char *x, const char *y) {
    add_numbers(x, y, pass->tokens * stack->hidden, stack->floats, stack->threads);
    count(stack, pass, NORMS);
}

/* Norm and scale a part's result in place, before it is added. */
static void finish(decoder_stack *stack, stack_pass *pass, const norm_weights *norm, float factor, char *x) {
    if (norm->weight)
        add_norm(stack, pass, norm, x, NULL, x);
    if (factor != 1.0f) {
        scale_numbers(x, factor, pass->tokens * stack->hidden, stack->floats, stack->threads);
        count(stack, pass, NORMS);
    }
}

/* `size` numbers of each token's queries and keys. */
static void norm_all_heads(decoder_stack *stack, stack_pass *pass, const norm_weights *norm, char *x, ptrdiff_t size,
                           ptrdiff_t stride) {
    if (norm->weight) {
        norm_rows(x, NULL, norm, x, pass->tokens, size, stride, stack->floats, stack->threads);
        count(stack, pass, NORMS);
    }
}

static int is_last(const decoder_stack *stack, const decoder_layer *layer) {
    return layer == stack->layers + stack->num_layers - 1;
}

/* Keep the rows of needed tokens alone, `count` numbers each: side by side from the first on. */
static void gather_needed(const decoder_stack *stack, const stack_pass *pass, char *rows, ptrdiff_t count) {
    ptrdiff_t size = bytes(stack, count);
    for (ptrdiff_t i = 0; i < pass->num_needed; i++)
        memmove(rows + i * size, rows + pass->needed[i] * size, (size_t)size);
}

/* The result's rows back to the places of their tokens. */
static void scatter_needed(const decoder_stack *stack, const stack_pass *pass) {
    ptrdiff_t size = bytes(stack, stack->hidden);
    for (ptrdiff_t i = pass->num_needed - 1; i >= 0; i--)
        memmove(pass->narrow + pass->needed[i] * size, pass->narrow + i * size, (size_t)size);
}

/* Of x into y. What is between goes through `wide` and `heads`. After the last layer's attention tokens are independent:
   the pass goes on with the needed ones. */
static void run_attention(decoder_stack *stack, stack_pass *pass, const decoder_layer *layer, const char *x, char *heads,
                          char *y) {
    char *queries = pass->wide, *keys = queries + bytes(stack, layer->queries),
         *values = keys + bytes(stack, layer->keys);
    ptrdiff_t width = layer->queries + 2 * layer->keys;
    pass->failed |= packed_matmul(layer->qkv, x, pass->tokens, pass->wide, stack->threads);
    count(stack, pass, MATRIX);
    norm_all_heads(stack, pass, &layer->query_row_norm, queries, layer->queries, width);
    norm_all_heads(stack, pass, &layer->key_row_norm, keys, layer->keys, width);
    attend_layer(pass->steps[layer->step], pass->rotations ? pass->rotations + layer->rotation : NULL, layer->cache,
                 queries, layer->keys ? keys : NULL, layer->keys ? values : NULL, heads, &layer->query_norm,
                 &layer->key_norm, layer->scale, layer->soft_cap, layer->sinks);
    if (pass->num_needed >= 0 && is_last(stack, layer)) {
        gather_needed(stack, pass, heads, layer->queries);
        gather_needed(stack, pass, pass->x, stack->hidden);
        if (heads != pass->narrow)
            gather_needed(stack, pass, pass->narrow, stack->hidden);
        pass->tokens = pass->num_needed;
    }
    count(stack, pass, ATTENTION);
    pass->failed |= packed_matmul(layer->output, heads, pass->tokens, y, stack->threads);
    count(stack, pass, MATRIX);
}

static void run_mlp(decoder_stack *stack, stack_pass *pass, const decoder_layer *layer, const char *x, char *y) {
    ptrdiff_t size = bytes(stack, stack->hidden), parts = (pass->tokens + stack->mlp_rows - 1) / stack->mlp_rows;
    for (ptrdiff_t part = 0, first = 0; part < parts; part++) {
        ptrdiff_t end = (part + 1) * pass->tokens / parts;
        pass->failed |= packed_matmul(layer->up, x + first * size, end - first, pass->wide, stack->threads);
        pass->failed |= packed_matmul(layer->down, pass->wide, end - first, y + first * size, stack->threads);
        first = end;
    }
    count(stack, pass, MATRIX);
}

static int has_ended(const decoder_stack *stack, const stack_pass *pass) {
    return pass->failed || (stack->interrupted && __atomic_load_n(stack->interrupted, __ATOMIC_RELAXED));
}

/* Of x + residual, into x, with y as the residual. Parallel parts: attention leaves their input, in `narrow`, as it
   is. */
static void run_layer(decoder_stack *stack, stack_pass *pass, const decoder_layer *layer) {
    char *x = pass->x, *y = pass->y, *narrow = pass->narrow, *input = narrow;
    char *heads = layer->parallel ? pass->wide + bytes(stack, pass->tokens * (layer->queries + 2 * layer->keys)) : narrow;
    if (layer->attention_norm.weight)
        add_norm(stack, pass, &layer->attention_norm, x, pass->residual, narrow);
    else if (pass->residual)
        add(stack, pass, x, pass->residual);
    run_attention(stack, pass, layer, layer->attention_norm.weight ? narrow : x, heads, y);
    finish(stack, pass, &layer->attention_result_norm, layer->factor, y);
    if (layer->parallel) {
        if (layer->mlp_norm.weight)
            add_norm(stack, pass, &layer->mlp_norm, x, NULL, narrow);
        add(stack, pass, y, x);
    } else if (layer->mlp_norm.weight) {
        add_norm(stack, pass, &layer->mlp_norm, y, x, narrow);
    } else {
        add(stack, pass, y, x);
        input = y;
    }
    run_mlp(stack, pass, layer, input, x);
    finish(stack, pass, &layer->mlp_result_norm, layer->factor, x);
    pass->residual = y;
}

static void run_post_norm_layer(decoder_stack *stack, stack_pass *pass, const decoder_layer *layer) {
    run_attention(stack, pass, layer, pass->x, pass->narrow, pass->y);
    add_norm(stack, pass, &layer->attention_norm, pass->y, pass->x, pass->x);
    run_mlp(stack, pass, layer, pass->x, pass->y);
    add_norm(stack, pass, &layer->mlp_norm, pass->y, pass->x, is_last(stack, layer) ? pass->narrow : pass->x);
}

static void run_layers(decoder_stack *stack, stack_pass *pass, ptrdiff_t first, ptrdiff_t end) {
    for (const decoder_layer *layer = stack->layers + first; layer < stack->layers + end; layer++) {
        if (has_ended(stack, pass))
            return;
        (stack->post_norm ? run_post_norm_layer : run_layer)(stack, pass, layer);
    }
    if (end == stack->num_layers && !stack->post_norm)
        add_norm(stack, pass, &stack->norm, pass->x, pass->residual, pass->narrow);
}

/* Layers [first, end). x, y [tokens][hidden]: embeddings in x and nothing in y before the first layer, and between
   layers the last part's result in x, which is to be added to y. narrow [tokens][the larger of hidden and queries]: the
   result after the last layer, [hidden] for each token. With num_needed >= 0 only those of the tokens `needed`
   [num_needed], distinct and in rising order, are defined; the last layer must be among those of the call. wide
   [tokens][queries + 2 keys], and queries once more for parallel parts, or [mlp_rows][the MLP's width] if that is more.
   Of an interrupted step there is no result. Returns whether there was no memory for it. */
int run_stack(decoder_stack *stack, ptrdiff_t first, ptrdiff_t end, const attention_step *const *steps,
              const head_rotation *rotations, const int64_t *needed, ptrdiff_t num_needed, ptrdiff_t tokens, void *x,
              void *y, void *narrow, void *wide) {
    stack_pass pass = {steps, rotations, needed, num_needed, tokens, x, y, narrow, wide, first ? y : NULL, now(), 0};
    run_layers(stack, &pass, first, end);
    if (end == stack->num_layers)
        scatter_needed(stack, &pass);
    return pass.failed;
}
