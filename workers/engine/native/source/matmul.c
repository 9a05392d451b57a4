/* Products with a matrix of weights that was packed once: y = f(x w' + b), x [m, k] and w [n, k] in bf16, sums in float.

   A packed matrix is panels of 32 rows of w. A panel holds, for each pair of neighbours along k, the pair of each of its rows: what two
   vdpbf16ps take. The panel's columns of y are computed for up to 12 rows of x at a time, whose sums stay in registers; the last panel is
   padded with zeros. In a gated matrix the first 16 rows of a panel are gates and the other 16 what they let through. */

#include <stddef.h>

#include "activation.h"
#include "bf16.h"

enum { PANEL = 32, HALF = PANEL / 2, MOST_ROWS = 12 };
enum { FEW_ROWS = 16, RUN_BYTES = 1 << 18 }; /* with few rows, weights are read as fast as they come: in long runs, which are read ahead */

typedef struct {
    const bf16 *panels; /* [ceil(n / 32)][k / 2][32][2] */
    const bf16 *bias;   /* [n], in the order of the panels' rows; NULL for none */
    ptrdiff_t n, k;     /* k is even */
    int activation;     /* one of activation.h's */
    int gated;          /* y [m, n / 2] */
    int to_float;       /* y in float instead of bf16 */
} packed_matrix;

int matmul_supported(void);
void pack_rows(const bf16 *w, ptrdiff_t n, ptrdiff_t k, int gated, bf16 *panels);
void packed_matmul(const packed_matrix *matrix, const bf16 *x, ptrdiff_t m, void *y);
void packed_lookup(const packed_matrix *matrix, const int64_t *rows, ptrdiff_t count, bf16 *y);

/* Which row of w is row `lane` of a panel; n or more for padding. */
static inline ptrdiff_t source_row(ptrdiff_t panel, ptrdiff_t lane, ptrdiff_t n, int gated) {
    if (!gated)
        return panel * PANEL + lane;
    ptrdiff_t row = panel * HALF + lane % HALF;
    if (row >= n / 2)
        return n;
    return lane < HALF ? row : n / 2 + row;
}

void pack_rows(const bf16 *w, ptrdiff_t n, ptrdiff_t k, int gated, bf16 *panels) {
#pragma omp parallel for
    for (ptrdiff_t panel = 0; panel < (n + PANEL - 1) / PANEL; panel++) {
        bf16 *to = panels + panel * PANEL * k;
        for (ptrdiff_t lane = 0; lane < PANEL; lane++) {
            ptrdiff_t row = source_row(panel, lane, n, gated);
            for (ptrdiff_t i = 0; i < k; i++)
                to[i / 2 * 2 * PANEL + 2 * lane + i % 2] = row < n ? w[row * k + i] : 0;
        }
    }
}

/* y [count, k]: rows of w themselves, as an embedding table gives them. Not for gated matrices. */
void packed_lookup(const packed_matrix *matrix, const int64_t *rows, ptrdiff_t count, bf16 *y) {
    ptrdiff_t k = matrix->k;
#pragma omp parallel for if (count > 64)
    for (ptrdiff_t i = 0; i < count; i++) {
        const bf16 *from = matrix->panels + rows[i] / PANEL * PANEL * k + rows[i] % PANEL * 2;
        for (ptrdiff_t pair = 0; pair < k / 2; pair++)
            memcpy(y + i * k + 2 * pair, from + pair * 2 * PANEL, 2 * sizeof(bf16));
    }
}

#ifdef __AVX512BF16__

#include <immintrin.h>

#define ALWAYS_INLINE static inline __attribute__((always_inline))

int matmul_supported(void) {
    return 1;
}

/* sums [rows][32] of `rows` rows of x with one panel. */
ALWAYS_INLINE void multiply(int rows, const bf16 *x, ptrdiff_t k, const bf16 *panel, float *sums) {
    __m512 sum[MOST_ROWS][2];
#pragma GCC unroll 12
    for (int i = 0; i < rows; i++)
        sum[i][0] = sum[i][1] = _mm512_setzero_ps();
    for (ptrdiff_t j = 0; j < k; j += 2, panel += 2 * PANEL) {
        __m512bh low = (__m512bh)_mm512_loadu_si512(panel), high = (__m512bh)_mm512_loadu_si512(panel + PANEL);
#pragma GCC unroll 12
        for (int i = 0; i < rows; i++) {
            int pair;
            memcpy(&pair, x + i * k + j, sizeof pair);
            __m512bh both = (__m512bh)_mm512_set1_epi32(pair);
            sum[i][0] = _mm512_dpbf16_ps(sum[i][0], both, low);
            sum[i][1] = _mm512_dpbf16_ps(sum[i][1], both, high);
        }
    }
#pragma GCC unroll 12
    for (int i = 0; i < rows; i++) {
        _mm512_storeu_ps(sums + i * PANEL, sum[i][0]);
        _mm512_storeu_ps(sums + i * PANEL + HALF, sum[i][1]);
    }
}

#define MULTIPLY(rows)                                                                                                                     \
    __attribute__((noinline)) static void multiply_##rows(const bf16 *x, ptrdiff_t k, const bf16 *panel, float *sums) {                    \
        multiply(rows, x, k, panel, sums);                                                                                                 \
    }
MULTIPLY(1)
MULTIPLY(2)
MULTIPLY(3)
MULTIPLY(4)
MULTIPLY(5)
MULTIPLY(6)
MULTIPLY(7)
MULTIPLY(8)
MULTIPLY(9)
MULTIPLY(10)
MULTIPLY(11)
MULTIPLY(12)

static void (*const multiply_rows[MOST_ROWS])(const bf16 *, ptrdiff_t, const bf16 *, float *) = {
    multiply_1, multiply_2, multiply_3, multiply_4,  multiply_5,  multiply_6,
    multiply_7, multiply_8, multiply_9, multiply_10, multiply_11, multiply_12,
};

/* What is left to do with a panel's sums [rows][32]; y is the panel's first element of the first row. */
static void finish(const packed_matrix *matrix, ptrdiff_t panel, int rows, float *sums, void *y, ptrdiff_t width, ptrdiff_t filled) {
    if (matrix->bias) {
        const bf16 *bias = matrix->bias + panel * PANEL;
        for (int i = 0; i < rows; i++)
            for (int j = 0; j < PANEL; j++)
                sums[i * PANEL + j] += float_of_bf16(bias[j]);
    }
    for (int i = 0; i < rows; i++) {
        float *row = sums + i * PANEL;
        if (matrix->gated) {
            activate(matrix->activation, row, HALF);
            for (int j = 0; j < HALF; j++)
                row[j] *= row[HALF + j];
        } else if (matrix->activation != ACTIVATION_NONE) {
            activate(matrix->activation, row, PANEL);
        }
        if (matrix->to_float) {
            memcpy((float *)y + i * width, row, (size_t)filled * sizeof(float));
        } else {
            bf16 rounded[PANEL];
            _mm512_storeu_si512(rounded, (__m512i)_mm512_cvtne2ps_pbh(_mm512_loadu_ps(row + HALF), _mm512_loadu_ps(row)));
            memcpy((bf16 *)y + i * width, rounded, (size_t)filled * sizeof(bf16));
        }
    }
}

static void multiply_panel(const packed_matrix *matrix, ptrdiff_t panel, const bf16 *x, ptrdiff_t m, void *y) {
    float sums[MOST_ROWS * PANEL] __attribute__((aligned(64)));
    ptrdiff_t k = matrix->k, width = matrix->gated ? matrix->n / 2 : matrix->n, columns = matrix->gated ? HALF : PANEL;
    ptrdiff_t filled = width - panel * columns < columns ? width - panel * columns : columns;
    size_t size = matrix->to_float ? sizeof(float) : sizeof(bf16);
    ptrdiff_t tiles = (m + MOST_ROWS - 1) / MOST_ROWS;
    for (ptrdiff_t tile = 0, row = 0; tile < tiles; tile++) {
        int rows = (int)((m - row + tiles - tile - 1) / (tiles - tile));
        multiply_rows[rows - 1](x + row * k, k, matrix->panels + panel * PANEL * k, sums);
        finish(matrix, panel, rows, sums, (char *)y + (size_t)(row * width + panel * columns) * size, width, filled);
        row += rows;
    }
}

void packed_matmul(const packed_matrix *matrix, const bf16 *x, ptrdiff_t m, void *y) {
    ptrdiff_t panels = (matrix->n + PANEL - 1) / PANEL;
    ptrdiff_t bytes = PANEL * matrix->k * (ptrdiff_t)sizeof(bf16), chunk = m <= FEW_ROWS && bytes < RUN_BYTES ? RUN_BYTES / bytes : 1;
#pragma omp parallel for schedule(dynamic, chunk)
    for (ptrdiff_t panel = 0; panel < panels; panel++)
        multiply_panel(matrix, panel, x, m, y);
}

#else

int matmul_supported(void) {
    return 0;
}

void packed_matmul(const packed_matrix *matrix, const bf16 *x, ptrdiff_t m, void *y) {
    (void)matrix, (void)x, (void)m, (void)y;
}

#endif
