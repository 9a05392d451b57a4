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

/* Numbers of a row that lie beside each other. */
static inline ptrdiff_t count_beside(int stored) {
    return stored == STORED_BF16 ? 2 : stored == STORED_INT8 ? (MULTIPLIES_QUADS ? 4 : 2) : 1;
}

/* The index in a panel of number i of its first row; not of int4. */
static inline ptrdiff_t place_in_panel(ptrdiff_t i, int stored) {
    ptrdiff_t beside = count_beside(stored);
    return i / beside * beside * PANEL + i % beside;
}

/* The same of the word of int4 that number i is in, and by how many bits it is shifted. */
static inline ptrdiff_t word_in_panel(ptrdiff_t i) {
    return i / 8 * PANEL;
}

static inline int shift_in_word(ptrdiff_t i) {
    return (int)(i % 8 / 2 * 4 + i % 2 * 16);
}

ALWAYS_INLINE void pack_panel(int stored, const char *w, ptrdiff_t panel, ptrdiff_t n, ptrdiff_t k, int gated,
                              char *to) {
    size_t size = (size_t)stored_bits(stored) / 8;
    ptrdiff_t beside = count_beside(stored);
    for (ptrdiff_t lane = 0; lane < PANEL; lane++) {
        ptrdiff_t row = source_row(panel, lane, n, gated);
        for (ptrdiff_t i = 0; row < n && i < k; i++)
            if (stored == STORED_INT4)
                ((uint32_t *)(void *)to)[word_in_panel(i) + lane] |= (uint32_t)(uint8_t)w[row * k + i]
                                                                     << shift_in_word(i);
            else if (stored == STORED_INT8)
                to[place_in_panel(i, stored) + lane * beside] = (char)(w[row * k + i] ^ QUAD_OFFSET);
            else
                memcpy(to + (size_t)(place_in_panel(i, stored) + lane * beside) * size,
                       w + (size_t)(row * k + i) * size, size);
    }
}

/* w [n][k] in the dtype `stored`, int4 as uint8. k is even for bf16, and panels are zeroed before. */
void pack_rows(const void *w, ptrdiff_t n, ptrdiff_t k, int stored, int gated, void *panels) {
#pragma omp parallel for
    for (ptrdiff_t panel = 0; panel < (n + PANEL - 1) / PANEL; panel++) {
        char *to = (char *)panels + panel * PANEL * padded(k, stored) * stored_bits(stored) / 8;
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

ALWAYS_INLINE float weight_at(int stored, const char *at) {
    float number;
    uint16_t half;
    if (stored == STORED_INT8)
        return (float)(int8_t)(*at ^ QUAD_OFFSET);
    if (stored == STORED_F32) {
        memcpy(&number, at, sizeof number);
        return number;
    }
    memcpy(&half, at, sizeof half);
    return stored == STORED_BF16 ? float_of_bf16(half) : float_of_f16(half);
}

ALWAYS_INLINE void look_up(int stored, const packed_matrix *matrix, int64_t row, void *y) {
    ptrdiff_t k = matrix->k, size = stored_bits(stored) / 8;
    const char *panel = (const char *)matrix->panels + row / PANEL * panel_bytes(matrix),
        *from = panel + row % PANEL * count_beside(stored) * size;
    for (ptrdiff_t i = 0; i < k; i++) {
        ptrdiff_t line = (row / PANEL * count_groups(matrix) + i / matrix->group) * PANEL + row % PANEL;
        float number;
        if (stored == STORED_INT4) {
            uint32_t word = ((const uint32_t *)(const void *)panel)[word_in_panel(i) + row % PANEL];
            number = (float)((int)(word >> shift_in_word(i) & 15) - matrix->zeros[line]);
        } else
            number = weight_at(stored, from + place_in_panel(i, stored) * size);
        if (is_integer(stored))
            number *= matrix->scales[line];
        if (matrix->floats)
            ((float *)y)[i] = number;
        else
            ((bf16 *)y)[i] = bf16_of_float(number);
    }
}

/* y [count, k]: rows of w themselves, as an embedding table gives them. Not for gated matrices. */
void packed_lookup(const packed_matrix *matrix, const int64_t *rows, ptrdiff_t count, void *y) {
    ptrdiff_t row_bytes = matrix->k * (ptrdiff_t)(matrix->floats ? sizeof(float) : sizeof(bf16));
#pragma omp parallel for if (count > 64)
    for (ptrdiff_t i = 0; i < count; i++) {
        WITH_STORED(look_up, matrix->stored, matrix, rows[i], (char *)y + i * row_bytes)
    }
}
