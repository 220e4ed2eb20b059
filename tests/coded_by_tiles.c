/* Products by coded matrices with AMX, whose tiles are imitated, to the bit those in portable C. */
#include "tiles_in_c.h"

#include "../devices/native/coded.c"

#include "coded_bits.h"

int is_zen_5; /* stands for that of instructions.c */

int main(void) {
    check_bits(AMX_BF16, "amx_bf16");
    must(!shapes_in_c.palette, "released in the end");
    return 0;
}
