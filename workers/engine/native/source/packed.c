/* Matrices of weights in the order in which matmul.c multiplies with them. */

#include <math.h>

#include "kernels.h"
#include "lanes.h"
#include "matmul.h"

int narrowest(const float *w, ptrdiff_t count);
void pack_rows(const void *w, ptrdiff_t n, ptrdiff_t k, int stored, int gated, void *panels);
void packed_lookup(const packed_matrix *matrix, const int64_t *rows, ptrdiff_t count, void *y);

/* Which row of w is row `lane` of a panel; n or more for padding. */
static inline ptrdiff_t source_row(ptrdiff_t panel, ptrdiff_t lane, ptrdiff_t n, int gated) {
    if (!gated)
        return panel * PANEL + lane;
    ptrdiff_t row = panel * HALF + lane % HALF;
    if (row >= n / 2)
        return n;
    return lane < HALF ? row : n / 2 + row;
}

/* The index in a panel of number i of its first row. */
static inline ptrdiff_t place_in_panel(ptrdiff_t i, int stored) {
    return stored == STORED_BF16 ? i / 2 * 2 * PANEL + i % 2 : i * PANEL;
}

ALWAYS_INLINE void pack_panel(int stored, const char *w, ptrdiff_t panel, ptrdiff_t n, ptrdiff_t k, int gated,
                              char *to) {
    size_t size = (size_t)stored_size(stored);
    ptrdiff_t beside = stored == STORED_BF16 ? 2 : 1;
    for (ptrdiff_t lane = 0; lane < PANEL; lane++) {
        ptrdiff_t row = source_row(panel, lane, n, gated);
        for (ptrdiff_t i = 0; row < n && i < k; i++)
            memcpy(to + (size_t)(place_in_panel(i, stored) + lane * beside) * size, w + (size_t)(row * k + i) * size,
                   size);
    }
}

/* w [n][k] in the dtype `stored`. k is even for bf16, and panels are zeroed before. */
void pack_rows(const void *w, ptrdiff_t n, ptrdiff_t k, int stored, int gated, void *panels) {
#pragma omp parallel for
    for (ptrdiff_t panel = 0; panel < (n + PANEL - 1) / PANEL; panel++) {
        char *to = (char *)panels + panel * PANEL * k * stored_size(stored);
        WITH_STORED(pack_panel, stored, w, panel, n, k, gated, to)
    }
}

/* Bit 0 is set where bf16 does not hold x exactly, bit 1 where float16 does not, or this processor cannot widen it. */
static inline int misfits(float x) {
    float size = fabsf(x), small = size * 0x1p24f; /* float16 has whole multiples of 2**-24 below 2**-14 */
    int bits = (int)bits_of_float(x);
    int in_f16 = size < 0x1p-14f ? small == (float)(int)small : size < 65505.0f && (bits & 0x1fff) == 0;
    return ((bits & 0xffff) != 0) | (!in_f16 || !HAS_F16) << 1;
}

/* The kind of fewest bits that holds all numbers exactly. */
int narrowest(const float *w, ptrdiff_t count) {
    enum { PART = 1 << 14 };
    int found = 0;
#pragma omp parallel for reduction(| : found)
    for (ptrdiff_t first = 0; first < count; first += PART) {
        int of_part = 0;
        if (found != 3)
            for (ptrdiff_t i = first; i < first + PART && i < count; i++)
                of_part |= misfits(w[i]);
        found |= of_part;
    }
    return !(found & 1) ? STORED_BF16 : !(found & 2) ? STORED_F16 : STORED_F32;
}

ALWAYS_INLINE void look_up(int stored, const packed_matrix *matrix, const char *from, float *y) {
    for (ptrdiff_t i = 0; i < matrix->k; i++) {
        uint16_t number;
        const char *at = from + place_in_panel(i, stored) * stored_size(stored);
        if (stored == STORED_F32) {
            memcpy(y + i, at, sizeof *y);
            continue;
        }
        memcpy(&number, at, sizeof number);
        y[i] = stored == STORED_BF16 ? float_of_bf16(number) : float_of_f16(number);
    }
}

/* y [count, k]: rows of w themselves, as an embedding table gives them. Not for gated matrices. */
void packed_lookup(const packed_matrix *matrix, const int64_t *rows, ptrdiff_t count, void *y) {
    ptrdiff_t k = matrix->k, beside = matrix->stored == STORED_BF16 ? 2 : 1;
#pragma omp parallel for if (count > 64)
    for (ptrdiff_t i = 0; i < count; i++) {
        const char *from = (const char *)matrix->panels
            + (rows[i] / PANEL * PANEL * k + rows[i] % PANEL * beside) * stored_size(matrix->stored);
        if (matrix->floats) {
            WITH_STORED(look_up, matrix->stored, matrix, from, (float *)y + i * k)
            continue;
        }
        for (ptrdiff_t pair = 0; pair < k / 2; pair++)
            memcpy((bf16 *)y + i * k + 2 * pair, (const bf16 *)from + pair * 2 * PANEL, 2 * sizeof(bf16));
    }
}

