/* The kernels that make up a layer, for callers in C. */
#ifndef KERNELS_H
#define KERNELS_H

#include <stddef.h>
#include <stdint.h>

#include "bf16.h"

typedef struct packed_matrix packed_matrix;
typedef struct attention_step attention_step;

/* Angles by which queries and keys are turned, in the numbers' own dtype. */
typedef struct {
    const void *cos, *sin; /* [tokens][head_dim], with the sine's first half negated */
    ptrdiff_t stride;      /* in numbers, from token to token */
} head_rotation;

/* Weights of a norm of rows, or of heads. */
typedef struct {
    const void *weight, *bias; /* no weight: no norm; no bias: of root mean squares */
    float eps;
    int32_t wide; /* whether the weight is in float, whatever the numbers are in; the bias is as they are */
    int32_t by_head, last; /* of heads: whether each has a weight and bias of its own; whether they are turned first */
} norm_weights;

int packed_matmul(const packed_matrix *matrix, const void *x, ptrdiff_t m, void *y, ptrdiff_t threads);
void norm_rows(void *x, const void *residual, const norm_weights *norm, void *y, ptrdiff_t m, ptrdiff_t n,
               ptrdiff_t stride, int floats, ptrdiff_t threads);
void add_numbers(void *x, const void *y, ptrdiff_t n, int floats, ptrdiff_t threads);
void scale_numbers(void *x, float factor, ptrdiff_t n, int floats, ptrdiff_t threads);
void attend_layer(const attention_step *step, const head_rotation *rotation, uint32_t *cache, const void *q,
                  const void *k, const void *v, void *out, const norm_weights *query_norm,
                  const norm_weights *key_norm, float scale, float soft_cap, const float *sinks);

#endif
