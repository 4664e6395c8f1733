// The same functions as in math_cpu.h, by CUDA's own library.

CO_FN float co_exp(float x) { return expf(x); }
CO_FN float co_log(float x) { return logf(x); }
CO_FN float co_log1p(float x) { return log1pf(x); }
CO_FN float co_tanh(float x) { return tanhf(x); }
CO_FN float co_erf(float x) { return erff(x); }
CO_FN float co_one_plus_erf(float x) { return erfcf(-x); }
CO_FN float co_expm1(float x) { return expm1f(x); }
CO_FN float co_sin(float x) { return sinf(x); }
CO_FN float co_cos(float x) { return cosf(x); }
CO_FN float co_pow(float x, float y) { return powf(x, y); }
CO_FN float co_sigmoid(float x) {
  const float e = expf(-fabsf(x));
  return (x < 0.0f ? e : 1.0f) / (1.0f + e);
}
