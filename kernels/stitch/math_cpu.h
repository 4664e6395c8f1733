// exp, log, tanh, erf, sigmoid of floats without branches, so that loops over them vectorise.
// Errors: see `dialects.py`; tests measure them. Doubles, and what is rare, go to the C library.

// 2^n * e^r with |r| <= ln 2 / 2; 2^n is two factors, so that results may be denormal.
CO_FN float co_exp(float x) {
  const float high = x > 89.0f ? 89.0f : x;
  const float c = high < -105.0f ? -105.0f : high;
  const float n = (c * 1.4426950408889634f + 12582912.0f) - 12582912.0f;
  const float r = (c - n * 0.693359375f) - n * -2.12194440054690583e-4f;
  float p = 1.9907570e-4f;
  p = p * r + 1.3933643e-3f;
  p = p * r + 8.3332863e-3f;
  p = p * r + 4.1666467e-2f;
  p = p * r + 0.16666667f;
  p = p * r + 0.5f;
  p = p * r * r + r + 1.0f;
  const int k = (int)n, half = k >> 1;
  return p * co_float((uint32_t)(half + 127) << 23) * co_float((uint32_t)(k - half + 127) << 23);
}

// x = 2^e * (1 + f) with 1 + f in [sqrt(1/2), sqrt(2)); denormals are scaled up first.
CO_FN float co_log(float x) {
  const bool tiny = x < 1.17549435e-38f;
  const uint32_t bits = co_bits(tiny ? x * 8388608.0f : x);
  const uint32_t shifted = bits - 0x3f3504f3u;
  const float e = (float)((int)shifted >> 23) - (tiny ? 23.0f : 0.0f);
  const float f = co_float((shifted & 0x007fffffu) + 0x3f3504f3u) - 1.0f;
  float p = 7.3324375e-2f;
  p = p * f - 0.11659887f;
  p = p * f + 0.11634677f;
  p = p * f - 0.12396707f;
  p = p * f + 0.14251155f;
  p = p * f - 0.16669151f;
  p = p * f + 0.20000689f;
  p = p * f - 0.24999981f;
  p = p * f + 0.33333331f;
  const float square = f * f;
  const float low = p * square * f + e * -2.12194440054690583e-4f;
  const float found = e * 0.693359375f + (f + (low - 0.5f * square));
  const float special = x == 0.0f ? -CO_INF : x == CO_INF ? CO_INF : CO_NAN;
  return (x > 0.0f) & (x < CO_INF) ? found : special;
}

// What 1 + x rounds away is added again.
CO_FN float co_log1p(float x) {
  const float u = 1.0f + x, lost = (x - (u - 1.0f)) / u;
  return co_log(u) + ((u > 0.0f) & (u < CO_INF) ? lost : 0.0f);
}

CO_FN float co_sigmoid(float x) {
  const float e = co_exp(-fabsf(x));
  return (x < 0.0f ? e : 1.0f) / (1.0f + e);
}

// 2^x for x in [-126, 126] to the absolute accuracy of results below 1: for sums with 1. The low
// bits of the shifted number are what 2^n has as its exponent.
CO_FN float co_exp2_near_one(float x) {
  const float shifted = x + 12583039.0f, r = x - (shifted - 12583039.0f);
  float p = 0.0013400431f;
  p = p * r + 0.009666373f;
  p = p * r + 0.055503331f;
  p = p * r + 0.24022348f;
  p = p * r + 0.69314718f;
  p = p * r + 1.0f;
  return p * co_float(co_bits(shifted) << 23);
}

// From 0.625 on 1 - 2 / (e^2x + 1), from 10 on the same as at 10, which is 1.
CO_FN float co_tanh(float x) {
  const float size = fabsf(x), square = x * x, t = size > 10.0f ? 10.0f : size;
  float p = 2.2989272e-3f;
  p = p * square - 8.3499942e-3f;
  p = p * square + 2.1770991e-2f;
  p = p * square - 5.3959548e-2f;
  p = p * square + 0.13333306f;
  p = p * square - 0.33333334f;
  const float large = 1.0f - 2.0f / (co_exp2_near_one(t * 2.8853900817779268f) + 1.0f);
  return size < 0.625f ? x + x * square * p : copysignf(large, x);
}

// A polynomial below 0.93, one minus 2 to the power of another up to 4, 1 from there on.
CO_FN float co_erf(float x) {
  const float size = fabsf(x), t = size > 4.0f ? 4.0f : size, square = t * t;
  float s = 8.3452242e-5f;
  s = s * square - 8.1374375e-4f;
  s = s * square + 5.2006342e-3f;
  s = s * square - 2.6859270e-2f;
  s = s * square + 0.11283694f;
  s = s * square - 0.37612635f;
  s = s * square + 0.12837917f;
  float l = 2.3119085e-06f;
  l = l * t - 6.5432905e-05f;
  l = l * t + 0.00085222255f;
  l = l * t - 0.006824357f;
  l = l * t + 0.037994161f;
  l = l * t - 0.15858853f;
  l = l * t - 0.91177648f;
  l = l * t - 1.6304351f;
  l = l * t + 0.00042455134f;
  const float found = size < 0.93f ? s * t + t : 1.0f - co_exp2_near_one(l);
  return copysignf(found, x);
}

// Without the polynomial that keeps erf exact near 0: log2 of erfc on [0, 4], 0 from there on.
CO_FN float co_one_plus_erf(float x) {
  const float size = fabsf(x), t = size > 4.0f ? 4.0f : size;
  float l = 2.747419e-06f;
  l = l * t - 4.9262391e-05f;
  l = l * t + 0.00034663307f;
  l = l * t - 0.00098120844f;
  l = l * t - 0.0018284079f;
  l = l * t + 0.029348437f;
  l = l * t - 0.14905626f;
  l = l * t - 0.91827933f;
  l = l * t - 1.6279193f;
  const float e = co_exp2_near_one(l * t), rest = size >= 4.0f ? 0.0f : e;
  return x < 0.0f ? rest : 2.0f - rest;
}

CO_FN float co_expm1(float x) { return ::expm1f(x); }
CO_FN float co_sin(float x) { return ::sinf(x); }
CO_FN float co_cos(float x) { return ::cosf(x); }
CO_FN float co_pow(float x, float y) { return ::powf(x, y); }
