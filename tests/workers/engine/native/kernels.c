/* Norms, attention (attention.c) and products by the library's own kernels against plain loops, for instructions that
   only an emulator may have. Prints one line, "right", or what is wrong. */

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "kernels.h"
#include "matmul.h"

enum { THREADS = 3 };
enum { ROWS = 101, FEW = 3, OUTPUTS = 70, INPUTS = 1026 };
enum { PANELS = 3, INT8_GROUP = 36, INT4_GROUP = 64, MOST_GROUPS = (INPUTS + INT8_GROUP - 1) / INT8_GROUP };

const char *wrong_attention(void);
int multiplies_quads(void);
int find_misfits(const float *w, ptrdiff_t count, ptrdiff_t threads);
void pack_rows(const void *w, ptrdiff_t n, ptrdiff_t k, int stored, int gated, void *panels, ptrdiff_t threads);

static float x[ROWS][INPUTS], w[OUTPUTS][INPUTS], bias[PANELS * PANEL], scales[PANELS * MOST_GROUPS * PANEL];
static float y[ROWS][OUTPUTS], alone[OUTPUTS], few[FEW][OUTPUTS];
static uint16_t narrow[OUTPUTS][INPUTS];
static int8_t bytes[OUTPUTS][INPUTS];
static uint8_t zeros[PANELS * MOST_GROUPS * PANEL];
static _Alignas(64) char panels[PANELS * PANEL * (INPUTS + 2) * 4];

static int group_of(int stored) {
    return stored == STORED_INT4 ? INT4_GROUP : stored == STORED_INT8 ? INT8_GROUP : INPUTS;
}

/* Which of `scales` and `zeros` belong to a weight. */
static int line_of(int stored, int output, int input) {
    int group = group_of(stored), groups = (INPUTS + group - 1) / group;
    return (output / PANEL * groups + input / group) * PANEL + output % PANEL;
}

/* Weights that are stored so. */
static void draw(int stored) {
    for (int i = 0; i < PANELS * MOST_GROUPS * PANEL; i++) {
        zeros[i] = (uint8_t)(rand() % 16);
        scales[i] = (float)(1 + rand() % 4) / 128.0f;
    }
    for (int i = 0; i < ROWS * INPUTS; i++)
        x[0][i] = (float)(rand() % 2001 - 1000) / 1000.0f;
    for (int i = 0; i < OUTPUTS * INPUTS; i++) {
        int number = rand() % 201 - 100;
        /* 1 + 2**-10 has more digits than bf16 has, and less than float16 has */
        w[0][i] = stored == STORED_F32 ? (float)number / 7.0f : stored == STORED_F16 ? 1.0f + 0x1p-10f : (float)number;
        uint32_t bits = bits_of_float(w[0][i]);
        narrow[0][i] = stored == STORED_F16 ? 0x3c01 : (uint16_t)(bits >> 16);
        int line = line_of(stored, i / INPUTS, i % INPUTS);
        if (stored == STORED_INT8) {
            bytes[0][i] = (int8_t)number;
            w[0][i] = (float)number * scales[line];
        } else if (stored == STORED_INT4) {
            bytes[0][i] = (int8_t)(rand() % 16);
            w[0][i] = (float)(bytes[0][i] - zeros[line]) * scales[line];
        }
    }
    for (int i = 0; i < OUTPUTS; i++)
        bias[i] = (float)i;
}

static const void *weights(int stored) {
    return stored == STORED_F32 ? (const void *)w : is_integer(stored) ? (const void *)bytes : narrow;
}

static int product_is_right(int stored) {
    draw(stored);
    int misfits = is_integer(stored) ? 0 : find_misfits(w[0], OUTPUTS * INPUTS, THREADS);
    if (!is_integer(stored) && (!(misfits & 1) ? STORED_BF16 : !(misfits & 2) ? STORED_F16 : STORED_F32) != stored)
        return 0;
    memset(panels, 0, sizeof panels);
    pack_rows(weights(stored), OUTPUTS, INPUTS, stored, 0, panels, THREADS);
    packed_matrix matrix = {
        .panels = panels, .scales = scales, .zeros = zeros, .bias = bias, .n = OUTPUTS, .k = INPUTS,
        .group = group_of(stored), .stored = stored, .floats = 1,
    };
    packed_matmul(&matrix, x, ROWS, y, THREADS);
    packed_matmul(&matrix, x, FEW, few, THREADS);
    if (memcmp(few, y, sizeof few))
        return 0;
    for (int row = 0; row < ROWS; row++) {
        packed_matmul(&matrix, x[row], 1, alone, THREADS);
        if (memcmp(alone, y[row], sizeof alone))
            return 0;
        for (int output = 0; output < OUTPUTS; output++) {
            /* Of the integers that x is rounded to: half a step for each product */
            double steps = multiplies_quads() ? 127 : 32767, sum = bias[output], size = 1,
                   rounded = is_integer(stored) ? 0.51 / steps : 0;
            for (int i = 0; i < INPUTS; i++) {
                sum += (double)x[row][i] * w[output][i];
                size += fabs((double)x[row][i] * w[output][i]) + 1e6 * rounded * fabs(w[output][i]);
            }
            if (!(fabs(sum - y[row][output]) < 1e-6 * size))
                return 0;
        }
    }
    return 1;
}

static int norm_is_right(void) {
    static float rows[600][64], weight[64], normed[600][64];
    for (int i = 0; i < 600 * 64; i++)
        rows[0][i] = i % 2 ? -3.0f : 3.0f;
    for (int i = 0; i < 64; i++)
        weight[i] = (float)i;
    norm_rows(rows, NULL, &(norm_weights){.weight = weight}, normed, 600, 64, 64, 1, THREADS);
    for (int i = 0; i < 64; i++)
        if (fabsf(normed[599][i] - (i % 2 ? -weight[i] : weight[i])) > 1e-4f)
            return 0;
    return 1;
}

int main(int count, char **arguments) {
    int halves = count > 1 && !strcmp(arguments[1], "halves");
    const char *attention = wrong_attention();
    if (!norm_is_right())
        puts("norms are wrong");
    else if (attention)
        puts(attention);
    else if (!product_is_right(STORED_F32))
        puts("products of floats are wrong");
    else if (!product_is_right(STORED_BF16))
        puts("products with bf16 are wrong");
    else if (!product_is_right(STORED_INT8))
        puts("products with int8 are wrong");
    else if (!product_is_right(STORED_INT4))
        puts("products with int4 are wrong");
    else if (halves && !product_is_right(STORED_F16))
        puts("products with float16 are wrong");
    else
        puts("right");
}
