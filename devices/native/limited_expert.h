/* The limited activation of experts, as those of gpt-oss. */
#ifndef MOESCHED_LIMITED_EXPERT_H
#define MOESCHED_LIMITED_EXPERT_H

#include "experts.h"

/* Numbers [first, last) that `down` multiplies. Roundings to bfloat16 are where torch has them: after each product, each bias,
 * and the activation. */
void gate_limited(const Expert *expert, int64_t first, int64_t last);

#endif
