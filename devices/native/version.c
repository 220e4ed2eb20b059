/* The version of the functions that Python calls. */
#include "team.h"

API int moesched_version(void) { return 17; }
