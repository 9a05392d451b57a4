/* A model's layers in one call: the same kernels in the same order as layers/stack.py has them called one by one, with
   nothing but buffers between them. Activations, norms and rotations are all in bf16, or all in float; matrices and the
   cache may be in 16 bits under float. */

#define _DEFAULT_SOURCE /* of clocks */

#include <string.h>
#include <time.h>

#include "kernels.h"

enum { MATRIX, ATTENTION, NORMS, PARTS };

typedef struct {
    norm_weights attention_norm, mlp_norm; /* the former may be missing in the first layer, unless norms come behind */
    norm_weights query_norm, key_norm;
    const packed_matrix *qkv, *output, *up, *down;
    uint32_t *cache;
    const float *sinks; /* [heads]; NULL for none */
    float scale, soft_cap; /* no cap: 0 */
    int32_t step, rotation; /* which are its own: layers of one pattern and block table share a step */
} decoder_layer;

typedef struct {
    const decoder_layer *layers;
    norm_weights norm; /* behind the last layer, unless norms come behind each part */
    int32_t post_norm; /* whether they do */
    int32_t num_layers, hidden, queries, keys; /* the latter three: numbers of a token */
    int32_t mlp_rows;                          /* tokens that go through an MLP together */
    int32_t floats;                            /* whether numbers are float instead of bf16 */
    int32_t threads;
    const int32_t *interrupted;                /* not 0: end at the next layer; NULL: never */
    double seconds[PARTS];                     /* spent so far, for those who profile */
} decoder_stack;

typedef struct {
    const attention_step *const *steps;
    const head_rotation *rotations; /* NULL for none */
    const int64_t *needed; /* this and the rest: as run_stack has them */
    ptrdiff_t num_needed, tokens;
    char *x, *y, *narrow, *wide;
    double since;
    int failed; /* whether there was no memory for a product */
} stack_pass;

int run_stack(decoder_stack *stack, const attention_step *const *steps, const head_rotation *rotations,
              const int64_t *needed, ptrdiff_t num_needed, ptrdiff_t tokens, void *x, void *y, void *narrow,
              void *wide);

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

/* x becomes x + residual, and y its norm; y may be the residual's place. */
static void add_norm(decoder_stack *stack, stack_pass *pass, const norm_weights *norm, char *x, const char *residual,
                     char *y) {
    norm_rows(x, residual, norm, y, pass->tokens, stack->hidden, stack->hidden, stack->floats,
              stack->threads);
    count(stack, pass, NORMS);
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

/* Of x into y. What is between goes through `wide` and `narrow`. After the last layer's attention tokens are
   independent: the pass goes on with the needed ones. */
static void run_attention(decoder_stack *stack, stack_pass *pass, const decoder_layer *layer, const char *x, char *y) {
    char *keys = pass->wide + bytes(stack, stack->queries), *values = keys + bytes(stack, stack->keys);
    pass->failed |= packed_matmul(layer->qkv, x, pass->tokens, pass->wide, stack->threads);
    count(stack, pass, MATRIX);
    attend_layer(pass->steps[layer->step], pass->rotations ? pass->rotations + layer->rotation : NULL, layer->cache,
                 pass->wide, keys, values, pass->narrow, &layer->query_norm, &layer->key_norm, layer->scale,
                 layer->soft_cap, layer->sinks);
    if (pass->num_needed >= 0 && is_last(stack, layer)) {
        gather_needed(stack, pass, pass->narrow, stack->queries);
        gather_needed(stack, pass, pass->x, stack->hidden);
        pass->tokens = pass->num_needed;
    }
    count(stack, pass, ATTENTION);
    pass->failed |= packed_matmul(layer->output, pass->narrow, pass->tokens, y, stack->threads);
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

static void run_pre_norm(decoder_stack *stack, stack_pass *pass) {
    const char *residual = NULL;
    for (const decoder_layer *layer = stack->layers; layer < stack->layers + stack->num_layers; layer++) {
        if (has_ended(stack, pass))
            return;
        if (layer->attention_norm.weight)
            add_norm(stack, pass, &layer->attention_norm, pass->x, residual, pass->narrow);
        run_attention(stack, pass, layer, layer->attention_norm.weight ? pass->narrow : pass->x, pass->y);
        add_norm(stack, pass, &layer->mlp_norm, pass->y, pass->x, pass->narrow);
        run_mlp(stack, pass, layer, pass->narrow, pass->x);
        residual = pass->y;
    }
    add_norm(stack, pass, &stack->norm, pass->x, residual, pass->narrow);
}

static void run_post_norm(decoder_stack *stack, stack_pass *pass) {
    for (const decoder_layer *layer = stack->layers; layer < stack->layers + stack->num_layers; layer++) {
        if (has_ended(stack, pass))
            return;
        run_attention(stack, pass, layer, pass->x, pass->y);
        add_norm(stack, pass, &layer->attention_norm, pass->y, pass->x, pass->x);
        run_mlp(stack, pass, layer, pass->x, pass->y);
        add_norm(stack, pass, &layer->mlp_norm, pass->y, pass->x, is_last(stack, layer) ? pass->narrow : pass->x);
    }
}

/* x [tokens][hidden], embeddings: used up, as y of the same size is. narrow [tokens][the larger of hidden and queries]:
   the result, [hidden] for each token. With num_needed >= 0 only those of the tokens `needed` [num_needed], distinct
   and in rising order, are defined. wide [tokens][queries + 2 keys], or [mlp_rows][the MLP's width] if that is more. Of
   an interrupted step there is no result. Returns whether there was no memory for it. */
int run_stack(decoder_stack *stack, const attention_step *const *steps, const head_rotation *rotations,
              const int64_t *needed, ptrdiff_t num_needed, ptrdiff_t tokens, void *x, void *y, void *narrow,
              void *wide) {
    stack_pass pass = {steps, rotations, needed, num_needed, tokens, x, y, narrow, wide, now(), 0};
    (stack->post_norm ? run_post_norm : run_pre_norm)(stack, &pass);
    scatter_needed(stack, &pass);
    return pass.failed;
}
