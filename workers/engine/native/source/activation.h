/* Activations in place, by the numbers that Python names them with (layers/activation.py has the formulas). */
#ifndef ACTIVATION_H
#define ACTIVATION_H

#include <math.h>

#include "vector_math.h"

enum { ACTIVATION_NONE, ACTIVATION_SILU, ACTIVATION_GELU_TANH, ACTIVATION_GELU, ACTIVATION_RELU };

static inline void activate(int activation, float *x, int count) {
    switch (activation) {
    case ACTIVATION_SILU:
        for (int i = 0; i < count; i++)
            x[i] *= fast_sigmoid(x[i]);
        break;
    case ACTIVATION_GELU_TANH: /* 0.5 x (1 + tanh(z)) is x sigmoid(2 z) */
        for (int i = 0; i < count; i++)
            x[i] *= fast_sigmoid(1.5957691216f * (x[i] + 0.044715f * x[i] * x[i] * x[i]));
        break;
    case ACTIVATION_GELU:
        for (int i = 0; i < count; i++)
            x[i] *= 0.5f * (1.0f + erff(x[i] * 0.70710678f));
        break;
    case ACTIVATION_RELU:
        for (int i = 0; i < count; i++)
            x[i] = x[i] < 0.0f ? 0.0f : x[i];
        break;
    default:
        break;
    }
}

#endif
