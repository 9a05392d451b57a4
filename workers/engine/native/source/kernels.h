/* The kernels that make up a layer, for callers in C. */
#ifndef KERNELS_H
#define KERNELS_H

#include <stddef.h>
#include <stdint.h>

#include "bf16.h"

typedef struct packed_matrix packed_matrix;
typedef struct attention_step attention_step;

/* By which queries and keys are turned, in the numbers' own dtype. */
typedef struct {
    const void *cos, *sin; /* [tokens][head_dim], with the sine's first half negated */
    ptrdiff_t stride;      /* in numbers, from token to token */
} head_rotation;

int packed_matmul(const packed_matrix *matrix, const void *x, ptrdiff_t m, void *y, ptrdiff_t threads);
void norm_rows(
    void *x, const void *residual, const void *weight, const void *bias, void *y, ptrdiff_t m, ptrdiff_t n, float eps,
    int centered, int floats, ptrdiff_t threads
);
void attend_layer(const attention_step *step, const head_rotation *rotation, uint32_t *cache, const void *q,
                  const void *k, const void *v, void *out, const void *query_norm, const void *key_norm, float eps,
                  float scale, float soft_cap, const float *sinks);

#endif
