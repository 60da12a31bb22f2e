/* A CUDA program without the toolkit: allocates pieces of 1 GiB until the driver refuses, and prints as JSON how many it
 * got, the size of the memory that the driver tells, and the code of the refusal. With an argument, it allocates at most
 * that many pieces, and keeps them until it is killed. */
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

typedef unsigned long long u64;

static void *function(void *library, const char *name) {
  void *found = dlsym(library, name);
  if (!found) { fprintf(stderr, "no function %s\n", name); exit(3); }
  return found;
}

static void must(int code, const char *what) {
  if (code) { fprintf(stderr, "%s failed: %d\n", what, code); exit(4); }
}

int main(int argc, char **argv) {
  void *library = dlopen("libcuda.so.1", RTLD_NOW);
  if (!library) { fprintf(stderr, "%s\n", dlerror()); return 2; }
  int (*init)(unsigned) = function(library, "cuInit");
  int (*device_count)(int *) = function(library, "cuDeviceGetCount");
  int (*context)(u64 *, unsigned, int) = function(library, "cuCtxCreate_v2");
  int (*allocate)(u64 *, size_t) = function(library, "cuMemAlloc_v2");
  int (*memory)(size_t *, size_t *) = function(library, "cuMemGetInfo_v2");
  u64 handle, address;
  size_t free_bytes = 0, total_bytes = 0;
  int devices = 0, pieces = 0, code = 0, most = argc > 1 ? atoi(argv[1]) : 1000;
  must(init(0), "cuInit");
  must(device_count(&devices), "cuDeviceGetCount");
  must(context(&handle, 0, 0), "cuCtxCreate");
  must(memory(&free_bytes, &total_bytes), "cuMemGetInfo");
  while (pieces < most && !(code = allocate(&address, (size_t)1 << 30))) pieces++;
  printf("{\"devices\": %d, \"totalGiB\": %zu, \"allocatedGiB\": %d, \"refusal\": %d}\n", devices,
         total_bytes >> 30, pieces, code);
  fflush(stdout);
  if (argc > 1) pause();
  return 0;
}
