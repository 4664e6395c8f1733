// The scalar functions of the op table (kernels/optable/pointwise.py) that no operator of C is.

CO_FN double co_exp(double x) { return ::exp(x); }
CO_FN double co_log(double x) { return ::log(x); }
CO_FN double co_log1p(double x) { return ::log1p(x); }
CO_FN double co_expm1(double x) { return ::expm1(x); }
CO_FN double co_tanh(double x) { return ::tanh(x); }
CO_FN double co_erf(double x) { return ::erf(x); }
CO_FN double co_one_plus_erf(double x) { return 1.0 + ::erf(x); }
CO_FN double co_sin(double x) { return ::sin(x); }
CO_FN double co_cos(double x) { return ::cos(x); }
CO_FN double co_pow(double x, double y) { return ::pow(x, y); }
CO_FN double co_sigmoid(double x) {
  const double e = ::exp(-::fabs(x));
  return (x < 0.0 ? e : 1.0) / (1.0 + e);
}

CO_FN float co_sqrt(float x) { return sqrtf(x); }
CO_FN double co_sqrt(double x) { return ::sqrt(x); }
CO_FN float co_floor(float x) { return floorf(x); }
CO_FN double co_floor(double x) { return ::floor(x); }
CO_FN float co_ceil(float x) { return ceilf(x); }
CO_FN double co_ceil(double x) { return ::ceil(x); }
CO_FN float co_round(float x) { return rintf(x); }
CO_FN double co_round(double x) { return ::rint(x); }
CO_FN float co_abs(float x) { return fabsf(x); }
CO_FN double co_abs(double x) { return ::fabs(x); }
template <class T> CO_FN T co_floor(T x) { return x; }
template <class T> CO_FN T co_ceil(T x) { return x; }
template <class T> CO_FN T co_round(T x) { return x; }
template <class T> CO_FN T co_abs(T x) { return (T)(x < 0 ? -x : x); }

// A NaN in either operand is the result: the comparison alone gives b for it.
template <class T> CO_FN T co_maximum(T a, T b) { return a != a ? a : a > b ? a : b; }
template <class T> CO_FN T co_minimum(T a, T b) { return a != a ? a : a < b ? a : b; }
template <class T> CO_FN T co_relu(T x) { return x < 0 ? (T)0 : x; }
template <class T> CO_FN T co_sign(T x) { return (T)((x > 0) - (x < 0)); }
template <class T> CO_FN T co_clamp(T x, T low, T high) {
  return co_minimum(co_maximum(x, low), high);
}

template <class T> CO_FN T co_rsqrt(T x) { return (T)1 / co_sqrt(x); }
template <class T> CO_FN T co_reciprocal(T x) { return (T)1 / x; }
template <class T> CO_FN T co_silu(T x) { return x * co_sigmoid(x); }
template <class T> CO_FN T co_hardsigmoid(T x) {
  return co_clamp(x + (T)3, (T)0, (T)6) / (T)6;
}
template <class T> CO_FN T co_hardswish(T x) { return x * co_hardsigmoid(x); }
template <class T> CO_FN T co_softplus(T x) {
  return x > (T)20 ? x : co_log1p(co_exp(co_minimum(x, (T)20)));
}
template <class T> CO_FN T co_mish(T x) { return x * co_tanh(co_softplus(x)); }
template <class T> CO_FN T co_gelu(T x) {
  return (T)0.5 * x * co_one_plus_erf(x * (T)0.70710678118654752440);
}

// numpy's: the remainder has the sign of the divisor, the quotient is rounded down.
CO_FN double co_remainder(double a, double b) {
  const double r = ::fmod(a, b);
  if (r == 0.0) return copysign(0.0, b);
  return (b < 0.0) != (r < 0.0) ? r + b : r;
}
CO_FN double co_floor_div(double a, double b) {
  if (b == 0.0) return a / b;
  const double r = ::fmod(a, b);
  const double q = (a - r) / b - (r != 0.0 && (b < 0.0) != (r < 0.0) ? 1.0 : 0.0);
  if (q == 0.0) return copysign(0.0, a / b);
  return ::floor(q) + (q - ::floor(q) > 0.5 ? 1.0 : 0.0);
}
CO_FN float co_remainder(float a, float b) { return (float)co_remainder((double)a, (double)b); }
CO_FN float co_floor_div(float a, float b) { return (float)co_floor_div((double)a, (double)b); }

// Whole numbers: 0 for a division by 0 (whoever may have one checks for it before); by -1 wraps.
template <class T> CO_FN T co_remainder(T a, T b) {
  if (b == 0 || ((T)-1 < 0 && b == (T)-1)) return 0;
  const T r = (T)(a % b);
  return (T)(r != 0 && (b < 0) != (r < 0) ? r + b : r);
}
template <class T> CO_FN T co_floor_div(T a, T b) {
  if (b == 0) return 0;
  if ((T)-1 < 0 && b == (T)-1) return (T)(0 - (uint64_t)a);
  return (T)(a / b - (a % b != 0 && (b < 0) != (a < 0)));
}
// A negative power of anything but 1 and -1 is 0.
template <class T> CO_FN T co_pow(T base, T exponent) {
  if (exponent < 0) {
    if (base == 1) return 1;
    return (T)(base == (T)-1 ? (exponent % 2 ? -1 : 1) : 0);
  }
  uint64_t found = 1, factor = (uint64_t)base;
  for (uint64_t left = (uint64_t)exponent; left; left >>= 1) {
    if (left & 1) found *= factor;
    factor *= factor;
  }
  return (T)found;
}

// An index into an extent: a negative one counts from the end; outside, the nearest one inside.
template <class T> CO_FN int64_t co_bounded(T index, int64_t extent) {
  const int64_t i = index < 0 ? (int64_t)index + extent : (int64_t)index;
  return i < 0 ? 0 : i >= extent ? extent - 1 : i;
}
