/* Functions written so that compilers vectorize loops over them. */
#ifndef VECTOR_MATH_H
#define VECTOR_MATH_H

#include <math.h>

#include "bf16.h"

/* e**x with a relative error of about 2e-7: 2**n times a polynomial on [-ln2/2, ln2/2] (Cody and Waite, 1980).
   0 below -87, infinite above 88. */
static inline float fast_exp(float x) {
    float limited = x < -87.0f ? -87.0f : (x > 88.0f ? 88.0f : x);
    float shifted = limited * 1.44269504f + 12582912.0f; /* 1.5 * 2**23: the sum's last bits are the rounded product */
    float n = shifted - 12582912.0f;
    float r = (limited - n * 0.693359375f) + n * 2.12194440e-4f;
    float p = 1.9875691500e-4f;
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * r * r + r + 1.0f;
    float power = float_of_bits((bits_of_float(shifted) << 23) + 0x3f800000u);
    return x != x ? x : (x < -87.0f ? 0.0f : (x > 88.0f ? INFINITY : p * power));
}

static inline float fast_sigmoid(float x) {
    return 1.0f / (1.0f + fast_exp(-x));
}

#endif
