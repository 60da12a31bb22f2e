/* A CUDA program without the toolkit that shares memory between processes.
 *
 * `ipc export BYTES` allocates memory, prints the result and its handle in hexadecimal digits; for each line on stdin it
 * prints the result of freeing the memory (once), and ends with stdin.
 * `ipc open HANDLE BYTES` opens the memory, allocates BYTES, allocates one more byte, writes to the opened memory and
 * closes it, and prints the results; for a line on stdin it ends. */
#include <dlfcn.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef unsigned long long u64;
/* CUipcMemHandle: passed by value, as in the driver's interface. */
typedef struct { unsigned char bytes[64]; } ipc_handle;

static void *library;

static void *find(const char *name) {
  void *found = dlsym(library, name);
  if (!found) { printf("no function %s\n", name); exit(3); }
  return found;
}

static void must(int code, const char *name) {
  if (code) { printf("%s failed: %d\n", name, code); exit(4); }
}

static int wait_for_line(void) {
  char line[16];
  fflush(stdout);
  return fgets(line, sizeof line, stdin) != NULL;
}

int main(int argc, char **argv) {
  library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
  if (!library || argc < 3) { printf("usage, or no driver\n"); return 2; }
  int (*allocate)(u64 *, size_t) = find("cuMemAlloc_v2");
  u64 context, address = 0;
  must(((int (*)(unsigned))find("cuInit"))(0), "cuInit");
  must(((int (*)(u64 *, unsigned, int))find("cuCtxCreate_v2"))(&context, 0, 0), "cuCtxCreate");
  ipc_handle handle;
  if (!strcmp(argv[1], "export")) {
    must(allocate(&address, strtoull(argv[2], NULL, 10)), "cuMemAlloc");
    int code = ((int (*)(ipc_handle *, u64))find("cuIpcGetMemHandle"))(&handle, address);
    printf("%d ", code);
    for (size_t i = 0; i < sizeof handle.bytes; i++) printf("%02x", handle.bytes[i]);
    printf("\n");
    while (wait_for_line()) printf("%d\n", ((int (*)(u64))find("cuMemFree_v2"))(address));
    return 0;
  }
  for (size_t i = 0; i < sizeof handle.bytes; i++) {
    unsigned byte = 0;
    if (sscanf(argv[2] + 2 * i, "%2x", &byte) != 1) { printf("no handle\n"); return 2; }
    handle.bytes[i] = (unsigned char)byte;
  }
  u64 own, more;
  int opened = ((int (*)(u64 *, ipc_handle, unsigned))find("cuIpcOpenMemHandle_v2"))(&address, handle, 1);
  int fits = allocate(&own, strtoull(argv[3], NULL, 10)), over = allocate(&more, 1);
  int written = ((int (*)(u64, unsigned char, size_t))find("cuMemsetD8_v2"))(address, 7, 4096);
  int (*close)(u64) = find("cuIpcCloseMemHandle");
  printf("%d %d %d %d %d", opened, fits, over, written, close(address));
  printf(" %d\n", close(address));
  wait_for_line();
  return 0;
}
