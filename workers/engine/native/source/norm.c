/* Norms over the rows of x [m, n], with the addition that precedes them in a decoder: x becomes x + residual, rounded
   to its dtype, and y its norm. Sums are taken in float. */

#include <math.h>
#include <stddef.h>

#include "kernels.h"
#include "parallel.h"

enum { MANY = 1 << 15 }; /* elements that are worth waking threads for */

#define ALWAYS_INLINE static inline __attribute__((always_inline))

ALWAYS_INLINE float get(const void *from, ptrdiff_t i, int floats) {
    return floats ? ((const float *)from)[i] : float_of_bf16(((const bf16 *)from)[i]);
}

ALWAYS_INLINE void put(void *to, ptrdiff_t i, float value, int floats) {
    if (floats)
        ((float *)to)[i] = value;
    else
        ((bf16 *)to)[i] = bf16_of_float(value);
}

ALWAYS_INLINE void norm_row(
    void *x, const void *residual, const void *weight, const void *bias, void *y, ptrdiff_t n, float eps, int centered,
    int floats, float *row
) {
    float sum = 0.0f, squares = 0.0f;
    if (residual) {
#pragma omp simd
        for (ptrdiff_t i = 0; i < n; i++)
            put(x, i, get(x, i, floats) + get(residual, i, floats), floats);
    }
#pragma omp simd reduction(+ : sum)
    for (ptrdiff_t i = 0; i < n; i++)
        sum += row[i] = get(x, i, floats);
    float mean = centered ? sum / (float)n : 0.0f;
#pragma omp simd reduction(+ : squares)
    for (ptrdiff_t i = 0; i < n; i++)
        squares += (row[i] - mean) * (row[i] - mean);
    float scale = 1.0f / sqrtf(squares / (float)n + eps);
    if (bias) {
#pragma omp simd
        for (ptrdiff_t i = 0; i < n; i++)
            put(y, i, (row[i] - mean) * scale * get(weight, i, floats) + get(bias, i, floats), floats);
    } else {
#pragma omp simd
        for (ptrdiff_t i = 0; i < n; i++)
            put(y, i, (row[i] - mean) * scale * get(weight, i, floats), floats);
    }
}

typedef struct {
    char *x;
    const char *residual;
    const void *weight, *bias;
    char *y;
    ptrdiff_t n;
    float eps;
    int centered, floats;
} normed_rows;

static void norm_range(void *work, ptrdiff_t first, ptrdiff_t end) {
    const normed_rows *rows = work;
    ptrdiff_t n = rows->n, stride = n * (ptrdiff_t)(rows->floats ? sizeof(float) : sizeof(bf16));
    float row[n];
    for (ptrdiff_t i = first; i < end; i++) {
        void *own = rows->x + i * stride, *out = rows->y + i * stride;
        const void *added = rows->residual ? rows->residual + i * stride : NULL;
        if (rows->floats)
            norm_row(own, added, rows->weight, rows->bias, out, n, rows->eps, rows->centered, 1, row);
        else
            norm_row(own, added, rows->weight, rows->bias, out, n, rows->eps, rows->centered, 0, row);
    }
}

/* x is changed only where there is a residual; residual, bias: NULL for none. All bf16, or all float. */
void norm_rows(
    void *x, const void *residual, const void *weight, const void *bias, void *y, ptrdiff_t m, ptrdiff_t n, float eps,
    int centered, int floats, ptrdiff_t threads
) {
    normed_rows rows = {x, residual, weight, bias, y, n, eps, centered, floats};
    run_ranges(norm_range, &rows, m, m * n > MANY ? threads : 1);
}
