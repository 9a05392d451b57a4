/* A decoder's layers in one call: the same kernels in the same order as layers/stack.py has them called one by one,
   with nothing but buffers between them. All in bf16. */

#include <time.h>

#include "kernels.h"

enum { MATRIX, ATTENTION, NORMS, PARTS };

typedef struct {
    const void *weight, *bias; /* no bias: of root mean squares */
    float eps;
} norm;

typedef struct {
    norm attention_norm, mlp_norm;
    const packed_matrix *qkv, *output, *up, *down;
    const void *query_norm, *key_norm; /* NULL for none */
    uint32_t *cache;
    float head_eps, scale;
    int32_t step; /* which of the steps is its own: layers of one pattern share one */
} decoder_layer;

typedef struct {
    const decoder_layer *layers;
    norm norm;
    int32_t num_layers, hidden, queries, keys; /* the latter three: numbers of a token */
    int32_t mlp_rows;                          /* tokens that go through an MLP together */
    const int32_t *interrupted;                /* not 0: end at the next layer; NULL: never */
    double seconds[PARTS];                     /* spent so far, for those who profile */
} decoder_stack;

void run_stack(decoder_stack *stack, const attention_step *const *steps, ptrdiff_t tokens, bf16 *x, bf16 *y,
               bf16 *narrow, bf16 *wide);

static double now(void) {
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return (double)time.tv_sec + 1e-9 * (double)time.tv_nsec;
}

static void count(decoder_stack *stack, int part, double *since) {
    double time = now();
    stack->seconds[part] += time - *since;
    *since = time;
}

static void add_norm(const norm *norm, bf16 *x, const bf16 *residual, bf16 *y, ptrdiff_t tokens, ptrdiff_t size) {
    norm_rows(x, residual, norm->weight, norm->bias, y, tokens, size, norm->eps, norm->bias != NULL, 0);
}

static void run_mlp(const decoder_stack *stack, const decoder_layer *layer, const bf16 *x, bf16 *wide, bf16 *y,
                    ptrdiff_t tokens) {
    ptrdiff_t size = stack->hidden, parts = (tokens + stack->mlp_rows - 1) / stack->mlp_rows;
    for (ptrdiff_t part = 0, first = 0; part < parts; part++) {
        ptrdiff_t end = (part + 1) * tokens / parts;
        packed_matmul(layer->up, x + first * size, end - first, wide);
        packed_matmul(layer->down, wide, end - first, y + first * size);
        first = end;
    }
}

/* x [tokens][hidden], embeddings: used up, as y of the same size is. narrow [tokens][the larger of hidden and queries]:
   the result, [hidden] for each token. wide [tokens][queries + 2 keys], or [mlp_rows][the MLP's width] if that is
   more. Of an interrupted step there is no result. */
void run_stack(decoder_stack *stack, const attention_step *const *steps, ptrdiff_t tokens, bf16 *x, bf16 *y,
               bf16 *narrow, bf16 *wide) {
    ptrdiff_t size = stack->hidden;
    const bf16 *residual = NULL;
    double since = now();
    for (const decoder_layer *layer = stack->layers; layer < stack->layers + stack->num_layers; layer++) {
        if (stack->interrupted && __atomic_load_n(stack->interrupted, __ATOMIC_RELAXED))
            return;
        add_norm(&layer->attention_norm, x, residual, narrow, tokens, size);
        count(stack, NORMS, &since);
        packed_matmul(layer->qkv, narrow, tokens, wide);
        count(stack, MATRIX, &since);
        attend_layer(steps[layer->step], layer->cache, wide, wide + stack->queries, wide + stack->queries + stack->keys,
                     narrow, layer->query_norm, layer->key_norm, layer->head_eps, layer->scale);
        count(stack, ATTENTION, &since);
        packed_matmul(layer->output, narrow, tokens, y);
        count(stack, MATRIX, &since);
        add_norm(&layer->mlp_norm, y, x, narrow, tokens, size);
        count(stack, NORMS, &since);
        run_mlp(stack, layer, narrow, wide, x, tokens);
        count(stack, MATRIX, &since);
        residual = y;
    }
    add_norm(&stack->norm, x, residual, narrow, tokens, size);
    count(stack, NORMS, &since);
}
