/* Norms over the rows of x [m, n], with the addition that precedes them in a decoder: x becomes x + residual, rounded
   to its dtype, and y its norm. Sums are taken in float. And what comes between norms: sums, and products with a
   factor, each rounded. */

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

ALWAYS_INLINE void norm_row(void *x, const void *residual, const norm_weights *norm, void *y, ptrdiff_t n, int floats,
                            int wide, float *row) {
    const void *weight = norm->weight, *bias = norm->bias;
    float sum = 0.0f, squares = 0.0f;
    if (residual) {
#pragma omp simd
        for (ptrdiff_t i = 0; i < n; i++)
            put(x, i, get(x, i, floats) + get(residual, i, floats), floats);
    }
#pragma omp simd reduction(+ : sum)
    for (ptrdiff_t i = 0; i < n; i++)
        sum += row[i] = get(x, i, floats);
    float mean = bias ? sum / (float)n : 0.0f;
#pragma omp simd reduction(+ : squares)
    for (ptrdiff_t i = 0; i < n; i++)
        squares += (row[i] - mean) * (row[i] - mean);
    float scale = 1.0f / sqrtf(squares / (float)n + norm->eps);
    if (bias) {
#pragma omp simd
        for (ptrdiff_t i = 0; i < n; i++)
            put(y, i, (row[i] - mean) * scale * get(weight, i, wide) + get(bias, i, floats), floats);
    } else {
#pragma omp simd
        for (ptrdiff_t i = 0; i < n; i++)
            put(y, i, (row[i] - mean) * scale * get(weight, i, wide), floats);
    }
}

typedef struct {
    char *x;
    const char *residual;
    const norm_weights *norm;
    char *y;
    ptrdiff_t n, stride;
    int floats;
} normed_rows;

static void norm_range(void *work, ptrdiff_t first, ptrdiff_t end) {
    const normed_rows *rows = work;
    ptrdiff_t n = rows->n, stride = rows->stride * (ptrdiff_t)(rows->floats ? sizeof(float) : sizeof(bf16));
    float row[n];
    for (ptrdiff_t i = first; i < end; i++) {
        void *own = rows->x + i * stride, *out = rows->y + i * stride;
        const void *added = rows->residual ? rows->residual + i * stride : NULL;
        if (rows->floats)
            norm_row(own, added, rows->norm, out, n, 1, 1, row);
        else if (rows->norm->wide)
            norm_row(own, added, rows->norm, out, n, 0, 1, row);
        else
            norm_row(own, added, rows->norm, out, n, 0, 0, row);
    }
}

/* x is changed only where there is a residual, else NULL, or where y is x. All bf16, or all float, but for wide weights.
   `stride`: numbers from row to row. */
void norm_rows(void *x, const void *residual, const norm_weights *norm, void *y, ptrdiff_t m, ptrdiff_t n,
               ptrdiff_t stride, int floats, ptrdiff_t threads) {
    normed_rows rows = {x, residual, norm, y, n, stride, floats};
    run_ranges(norm_range, &rows, m, m * n > MANY ? threads : 1);
}

typedef struct {
    void *x;
    const void *y; /* NULL for a product with the factor, in place of a sum */
    float factor;
    int floats;
} changed_numbers;

ALWAYS_INLINE void change(const changed_numbers *work, ptrdiff_t first, ptrdiff_t end, int floats) {
    void *x = work->x;
    const void *y = work->y;
    float factor = work->factor;
    if (y) {
#pragma omp simd
        for (ptrdiff_t i = first; i < end; i++)
            put(x, i, get(x, i, floats) + get(y, i, floats), floats);
    } else {
#pragma omp simd
        for (ptrdiff_t i = first; i < end; i++)
            put(x, i, get(x, i, floats) * factor, floats);
    }
}

static void change_range(void *work, ptrdiff_t first, ptrdiff_t end) {
    const changed_numbers *numbers = work;
    if (numbers->floats)
        change(numbers, first, end, 1);
    else
        change(numbers, first, end, 0);
}

/* x becomes x + y. */
void add_numbers(void *x, const void *y, ptrdiff_t n, int floats, ptrdiff_t threads) {
    changed_numbers numbers = {x, y, 0.0f, floats};
    run_ranges(change_range, &numbers, n, n > MANY ? threads : 1);
}

void scale_numbers(void *x, float factor, ptrdiff_t n, int floats, ptrdiff_t threads) {
    changed_numbers numbers = {x, NULL, factor, floats};
    run_ranges(change_range, &numbers, n, n > MANY ? threads : 1);
}
