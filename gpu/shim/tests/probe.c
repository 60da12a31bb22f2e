/* A CUDA program without the toolkit: `probe LOADING COMMAND ARGUMENTS...` finds the driver's functions the way
 * LOADING says (linked, dlsym, global, address, thread, address1, address13) and prints what COMMAND saw. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <pthread.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

typedef unsigned long long u64;
typedef int (*fn)();

static void *library;
static int (*get_address)(const char *, void **, int, u64, int *);
static int (*get_address_v1)(const char *, void **, int, u64);
/* 2: the functions of the per-thread default stream. */
static u64 address_flags;
static int cuda_version = 12080;
static const char *loading;

#ifdef LINKED
extern int cuInit(), cuDeviceGet(), cuCtxCreate_v2(), cuMemAlloc_v2(), cuMemAllocManaged(), cuMemAllocPitch_v2(),
    cuMemFree_v2(), cuMemGetInfo_v2(), cuLaunchKernel(), cuModuleLoadData(), cuModuleGetFunction(), cuCtxSynchronize();
static struct { const char *name; fn function; } linked[] = {
#define F(n) {#n, (fn)n}
    F(cuInit), F(cuDeviceGet), F(cuCtxCreate_v2), F(cuMemAlloc_v2), F(cuMemAllocManaged), F(cuMemAllocPitch_v2),
    F(cuMemFree_v2), F(cuMemGetInfo_v2), F(cuLaunchKernel), F(cuModuleLoadData), F(cuModuleGetFunction),
    F(cuCtxSynchronize),
};
#endif

/* The function of an exported name; through cuGetProcAddress by the base name, as the CUDA runtime asks. */
static fn find(const char *name) {
#ifdef LINKED
  for (unsigned i = 0; i < sizeof linked / sizeof *linked; i++)
    if (!strcmp(linked[i].name, name)) return linked[i].function;
#endif
  void *found = NULL;
  /* Through cuGetProcAddress, the name stands for a version with other parameters. */
  int by_address = strcmp(name, "cuCtxCreate_v2") && (get_address || get_address_v1);
  if (by_address) {
    char base[64];
    snprintf(base, sizeof base, "%s", name);
    char *suffix = strstr(base, "_v2");
    if (suffix) *suffix = 0;
    int status = 7;
    if (get_address_v1) {
      if (get_address_v1(base, &found, 11030, address_flags)) found = NULL;
      status = 0;
    } else {
      get_address(base, &found, cuda_version, address_flags, &status);
    }
    if (found && status != 0) { printf("status %d for %s\n", status, base); exit(3); }
  } else {
    found = dlsym(strcmp(loading, "global") ? library : RTLD_DEFAULT, name);
  }
  if (!found) { printf("no function %s\n", name); exit(3); }
  return (fn)found;
}
#define CALL(name, ...) (find(#name)(__VA_ARGS__))
#define MUST(name, ...) do { int code_ = CALL(name, __VA_ARGS__); \
    if (code_) { printf("%s failed: %d\n", #name, code_); exit(4); } } while (0)

struct array { size_t width, height; int format; unsigned channels; };
struct array3d { size_t width, height, depth; int format; unsigned channels, flags; };
static void *null_stream = NULL;

static void begin(int device) {
  MUST(cuInit, 0);
  u64 context;
  MUST(cuCtxCreate_v2, &context, 0, device);
}

/* Allocates `bytes` the way that `kind` names. */
static int allocate(const char *kind, size_t bytes, u64 *out) {
  size_t pitch;
  if (!strcmp(kind, "alloc")) return CALL(cuMemAlloc_v2, out, bytes);
  if (!strcmp(kind, "managed")) return CALL(cuMemAllocManaged, out, bytes, 1);
  if (!strcmp(kind, "pitch")) return CALL(cuMemAllocPitch_v2, out, &pitch, (size_t)512, bytes / 512, 4);
  if (!strcmp(kind, "async")) return CALL(cuMemAllocAsync, out, bytes, null_stream);
  if (!strcmp(kind, "create")) {
    int properties[8] = {1, 0, 1, 0, 0, 0, 0, 0};
    return CALL(cuMemCreate, out, bytes, properties, (u64)0);
  }
  if (!strcmp(kind, "array")) {
    struct array d = {bytes / 4096, 1024, 0x20, 1};
    return CALL(cuArrayCreate_v2, out, &d);
  }
  if (!strcmp(kind, "array3d")) {
    struct array3d d = {bytes / 4096, 32, 32, 0x01, 4, 0};
    return CALL(cuArray3DCreate_v2, out, &d);
  }
  if (!strcmp(kind, "line")) {
    struct array d = {bytes / 4, 0, 0x20, 1};
    return CALL(cuArrayCreate_v2, out, &d);
  }
  if (!strcmp(kind, "mipmapped")) {
    struct array3d d = {bytes / 1024, 256, 0, 0x20, 1, 0};
    return CALL(cuMipmappedArrayCreate, out, &d, 1);
  }
  if (!strcmp(kind, "pool")) {
    int properties[32] = {1, 0, 1, 0};
    u64 pool;
    MUST(cuMemPoolCreate, &pool, properties);
    return CALL(cuMemAllocFromPoolAsync, out, bytes, pool, null_stream);
  }
  exit(5);
}

static int release(const char *kind, u64 value) {
  if (!strcmp(kind, "async") || !strcmp(kind, "pool")) return CALL(cuMemFreeAsync, value, null_stream);
  if (!strcmp(kind, "create")) return CALL(cuMemRelease, value);
  if (!strncmp(kind, "array", 5) || !strcmp(kind, "line")) return CALL(cuArrayDestroy, value);
  if (!strcmp(kind, "mipmapped")) return CALL(cuMipmappedArrayDestroy, value);
  return CALL(cuMemFree_v2, value);
}

/* Halves of the limit: two fit, a third fits only after a free; a double free has no effect. */
static void halves(const char *kind, size_t half) {
  u64 a, b, c;
  int first = allocate(kind, half, &a), second = allocate(kind, half, &b), third = allocate(kind, half, &c);
  int freed = release(kind, a), again = allocate(kind, half, &c);
  int over = allocate(kind, half, &a);
  /* A real driver may crash when an object is freed twice; addresses are checked. */
  int by_address = !getenv("PROBE_COUNT_PER_US") || !strcmp(kind, "alloc") || !strcmp(kind, "managed");
  int freed_twice = release(kind, c) || !by_address || release(kind, c);
  int one = allocate(kind, half, &c), two = allocate(kind, half, &a);
  printf("%d %d %d %d %d %d %d %d %d\n", first, second, third, freed, again, over, freed_twice != 0, one, two);
}

static u64 now(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return t.tv_sec * 1000000000ull + t.tv_nsec;
}

/* A kernel that repeats a multiplication `count` times and adds its run time in ns to `busy`. The simulated driver
 * ignores the code and takes the time at the end of the name. */
static const char *CODE = ".version 6.4\n.target sm_75\n.address_size 64\n"
    ".visible .entry %s(.param .u64 count, .param .u64 busy)\n{\n"
    ".reg .pred %%p<3>;\n.reg .u64 %%r<8>;\n.reg .f32 %%f<2>;\n"
    "mov.u64 %%r1, %%globaltimer;\nld.param.u64 %%r2, [count];\nld.param.u64 %%r3, [busy];\n"
    "cvta.to.global.u64 %%r4, %%r3;\nmov.u64 %%r5, 0;\nmov.f32 %%f1, 0f3F000000;\n"
    "NEXT:\nsetp.ge.u64 %%p1, %%r5, %%r2;\n@%%p1 bra DONE;\n"
    "fma.rn.f32 %%f1, %%f1, %%f1, %%f1;\nadd.u64 %%r5, %%r5, 1;\nbra NEXT;\n"
    /* The result must look needed. */
    "DONE:\nsetp.eq.f32 %%p2, %%f1, 0f3DCCCCCD;\n@%%p2 st.global.u64 [%%r4], %%r5;\n"
    "mov.u64 %%r6, %%globaltimer;\nsub.u64 %%r7, %%r6, %%r1;\nred.global.add.u64 [%%r4], %%r7;\nret;\n}\n";

struct kernel {
  u64 function, count, busy;
  void *parameters[2];
};

/* The kernel `NAME_<number>us` (or ms): on a real GPU it runs that long, by PROBE_COUNT_PER_US. */
static void load(struct kernel *kernel, const char *name) {
  char code[4096];
  u64 module;
  const char *number = strrchr(name, '_'), *per_us = getenv("PROBE_COUNT_PER_US");
  char *unit;
  double us = number ? strtod(number + 1, &unit) * (strcmp(unit, "ms") ? 1 : 1000) : 0;
  snprintf(code, sizeof code, CODE, name);
  MUST(cuModuleLoadData, &module, code);
  MUST(cuModuleGetFunction, &kernel->function, module, name);
  kernel->count = per_us ? us * atof(per_us) : 0;
  MUST(cuMemAlloc_v2, &kernel->busy, (size_t)8);
  if (CALL(cuMemsetD8_v2, kernel->busy, 0, (size_t)8)) exit(13);
  kernel->parameters[0] = &kernel->count;
  kernel->parameters[1] = &kernel->busy;
}

static int launch_one(fn launch, struct kernel *kernel, u64 stream) {
  return launch(kernel->function, 1, 1, 1, 1, 1, 1, 0, (void *)stream, kernel->parameters, NULL);
}

/* Run time of the kernel's launches so far, in ns, as the GPU saw it; 0 on a simulated GPU. */
static u64 busy_ns(struct kernel *kernel) {
  u64 ns = 0;
  MUST(cuMemcpyDtoH_v2, &ns, kernel->busy, (size_t)8);
  return ns;
}

/* Launches for some milliseconds, synchronising every `batch` launches (0: never); prints launches, ns, and the ns that
 * the kernels ran. */
static void spin(const char *name, int ms, int batch) {
  struct kernel kernel;
  load(&kernel, name);
  fn launch = find("cuLaunchKernel"), synchronize = find("cuCtxSynchronize");
  long launches = 0;
  u64 start = now(), end = start + ms * 1000000ull;
  for (; now() < end; launches++) {
    int code = launch_one(launch, &kernel, 0);
    if (code) { printf("launch failed: %d\n", code); exit(4); }
    if (batch && launches % batch == 0) synchronize();
  }
  synchronize();
  u64 ns = now() - start;
  printf("%ld %llu %llu\n", launches, ns, busy_ns(&kernel));
}

/* Prints how many repetitions a kernel makes in a microsecond. */
static void calibrate(void) {
  struct kernel kernel;
  fn launch = find("cuLaunchKernel"), synchronize = find("cuCtxSynchronize");
  load(&kernel, "work_0us");
  for (int round = 0; round < 2; round++) { /* the first one is to raise the clock */
    kernel.count = 100000000;
    u64 before = busy_ns(&kernel);
    if (launch_one(launch, &kernel, 0) || synchronize()) exit(14);
    if (round) printf("%.3f\n", kernel.count * 1e3 / (busy_ns(&kernel) - before));
  }
}

/* CPU time of this process, independent of other programs on the machine. */
static u64 cpu(void) {
  struct timespec t;
  clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &t);
  return t.tv_sec * 1000000000ull + t.tv_nsec;
}

/* Processor time and time of one of `count` repetitions of the statement, in ns, after a tenth of them to warm up. */
#define REPEAT(count, statement) do { \
    for (long i_ = 0; i_ < (count) / 10; i_++) { statement; } \
    u64 cpu_ = cpu(), start_ = now(); \
    for (long i_ = 0; i_ < (count); i_++) { statement; } \
    printf("%.1f %.1f\n", (double)(cpu() - cpu_) / (count), (double)(now() - start_) / (count)); } while (0)
#define SAFE(call) do { int code_ = call; if (code_) { printf("%s: %d\n", #call, code_); exit(4); } } while (0)

static u64 captured(struct kernel *kernel, u64 stream) {
  u64 graph, executable;
  fn launch = find("cuLaunchKernel");
  MUST(cuStreamBeginCapture_v2, stream, 0);
  for (int i = 0; i < 4; i++) SAFE(launch_one(launch, kernel, stream));
  MUST(cuStreamEndCapture, stream, &graph);
  MUST(cuGraphInstantiateWithFlags, &executable, graph, (u64)0);
  return executable;
}

/* The cost of a launch: of a kernel, synchronised every `batch` launches (0: never), or of a graph of four (-1). */
static void launches(const char *name, long count, int batch) {
  u64 stream;
  struct kernel kernel;
  load(&kernel, name);
  MUST(cuStreamCreate, &stream, 1);
  fn launch = find("cuLaunchKernel"), synchronize = find("cuCtxSynchronize"), launch_graph = find("cuGraphLaunch");
  if (batch < 0) {
    u64 executable = captured(&kernel, stream);
    REPEAT(count, SAFE(launch_graph(executable, (void *)stream)));
  } else if (batch == 0) {
    REPEAT(count, SAFE(launch_one(launch, &kernel, stream)));
  } else {
    REPEAT(count, SAFE(launch_one(launch, &kernel, stream)); if (i_ % batch == 0) synchronize());
  }
}

static size_t thread_bytes;
static void *thread(void *counter) {
  u64 address, context;
  MUST(cuCtxCreate_v2, &context, 0, 0);
  for (int i = 0; i < 500; i++) {
    if (allocate("alloc", thread_bytes, &address) == 0) {
      __atomic_add_fetch((long *)counter, 1, __ATOMIC_RELAXED);
      if (release("alloc", address)) exit(6);
    }
  }
  return NULL;
}

int main(int argc, char **argv) {
  loading = argv[1];
  if (strcmp(loading, "linked")) {
    library = dlopen("libcuda.so.1", RTLD_NOW | (strcmp(loading, "global") ? RTLD_LOCAL : RTLD_GLOBAL));
    if (!library) { printf("%s\n", dlerror()); return 2; }
  }
  if (!strcmp(loading, "address") || !strcmp(loading, "thread") || !strcmp(loading, "address13"))
    get_address = dlsym(library, "cuGetProcAddress_v2");
  if (!strcmp(loading, "address13")) {
    /* As the CUDA runtime, which looks all functions up when it starts, also those that have other parameters. */
    cuda_version = 13000;
    find("cuCtxGetDevice");
  }
  if (!strcmp(loading, "thread")) address_flags = 2;
  if (!strcmp(loading, "address1")) get_address_v1 = dlsym(library, "cuGetProcAddress");
  const char *command = argv[2];
  setvbuf(stdout, NULL, _IONBF, 0);
  size_t bytes = argc > 4 ? strtoull(argv[4], NULL, 10) : 0;
  if (!strcmp(command, "halves")) {
    begin(0);
    halves(argv[3], bytes);
  } else if (!strcmp(command, "take")) { /* allocates and waits for the end of stdin */
    u64 address;
    begin(0);
    printf("%d\n", allocate(argv[3], bytes, &address));
    while (getchar() != EOF) {}
  } else if (!strcmp(command, "crash")) {
    u64 address;
    begin(0);
    printf("%d\n", allocate(argv[3], bytes, &address));
    abort();
  } else if (!strcmp(command, "info")) {
    size_t free_bytes, total, device_total;
    begin(0);
    MUST(cuMemGetInfo_v2, &free_bytes, &total);
    MUST(cuDeviceTotalMem_v2, &device_total, 0);
    size_t device1;
    if (CALL(cuDeviceTotalMem_v2, &device1, 1)) device1 = 0;
    printf("%zu %zu %zu %zu\n", free_bytes, total, device_total, device1);
  } else if (!strcmp(command, "again")) { /* one allocation at each line of stdin */
    u64 address;
    begin(0);
    while (getchar() != EOF) printf("%d\n", allocate(argv[3], bytes, &address));
  } else if (!strcmp(command, "fork")) {
    /* The child of a process without CUDA allocates; then the parent has room for the rest only. */
    int ready[2], done[2];
    char byte = 0;
    u64 address;
    if (pipe(ready) || pipe(done)) return 7;
    if (getenv("PROBE_TOUCH")) dlsym(RTLD_DEFAULT, "cuInit");
    pid_t child = fork();
    if (child == 0) {
      begin(0);
      byte = allocate("alloc", bytes, &address);
      if (write(ready[1], &byte, 1) != 1 || read(done[0], &byte, 1) < 0) return 8;
      _exit(0);
    }
    begin(0);
    if (read(ready[0], &byte, 1) != 1) return 9;
    int while_there = allocate("alloc", bytes, &address);
    kill(child, 9);
    waitpid(child, NULL, 0);
    printf("%d %d %d\n", byte, while_there, allocate("alloc", bytes, &address));
  } else if (!strcmp(command, "exec")) {
    u64 address;
    begin(0);
    int code = allocate("alloc", bytes, &address);
    if (code) return 10;
    execl(argv[0], argv[0], loading, "take", "alloc", argv[4], NULL);
  } else if (!strcmp(command, "threads")) {
    begin(0);
    thread_bytes = bytes;
    pthread_t threads[8];
    long done = 0;
    u64 address;
    for (int i = 0; i < 8; i++) pthread_create(&threads[i], NULL, thread, &done);
    for (int i = 0; i < 8; i++) pthread_join(threads[i], NULL);
    printf("%d %d\n", done > 0, allocate("alloc", bytes * 3, &address));
  } else if (!strcmp(command, "mapped")) { /* VMM: memory counts until its last mapping is gone */
    u64 handle, address, other;
    begin(0);
    MUST(cuMemAddressReserve, &address, bytes, (size_t)0, (u64)0, (u64)0);
    int made = allocate("create", bytes, &handle);
    MUST(cuMemMap, address, bytes, (size_t)0, handle, (u64)0);
    MUST(cuMemRelease, handle);
    int while_mapped = allocate("create", bytes, &other);
    MUST(cuMemUnmap, address, bytes);
    /* Two mappings that one call removes. */
    u64 half = bytes / 2;
    if (allocate("create", half, &handle) || allocate("create", half, &other)) return 15;
    MUST(cuMemMap, address, half, (size_t)0, handle, (u64)0);
    MUST(cuMemMap, address + half, half, (size_t)0, other, (u64)0);
    MUST(cuMemRelease, handle);
    MUST(cuMemRelease, other);
    MUST(cuMemUnmap, address, bytes);
    printf("%d %d %d\n", made, while_mapped, allocate("create", bytes, &other));
  } else if (!strcmp(command, "keep")) { /* a pool that keeps freed memory is trimmed before a refusal */
    u64 pool, address, threshold = ~0ull;
    size_t free_bytes, total;
    begin(0);
    MUST(cuDeviceGetDefaultMemPool, &pool, 0);
    MUST(cuMemPoolSetAttribute, pool, 4, &threshold);
    int first = allocate("async", bytes, &address);
    MUST(cuMemFreeAsync, address, null_stream);
    int reused = allocate("async", bytes, &address);
    MUST(cuMemFreeAsync, address, null_stream);
    MUST(cuMemGetInfo_v2, &free_bytes, &total);
    printf("%d %d %d %d\n", first, reused, total - free_bytes >= bytes, allocate("alloc", bytes, &address));
  } else if (!strcmp(command, "capture")) {
    /* Memory of a graph is compared with the limit when a stream records it; the capture goes on. */
    u64 stream, graph, executable, small, large;
    begin(0);
    MUST(cuStreamCreate, &stream, 1);
    MUST(cuStreamBeginCapture_v2, stream, 0);
    int fits = CALL(cuMemAllocAsync, &small, bytes, (void *)stream);
    int exceeds = CALL(cuMemAllocAsync, &large, bytes * 2, (void *)stream);
    MUST(cuMemFreeAsync, small, (void *)stream);
    MUST(cuStreamEndCapture, stream, &graph);
    MUST(cuGraphInstantiateWithFlags, &executable, graph, (u64)0);
    int launched = CALL(cuGraphLaunch, executable, (void *)stream);
    MUST(cuStreamSynchronize, (void *)stream);
    printf("%d %d %d\n", fits, exceeds, launched);
  } else if (!strcmp(command, "devices")) {
    /* Memory counts for its own device, whatever device the current context is of. Only the first one is limited. */
    u64 handle, context, address;
    int first[8] = {1, 0, 1, 0, 0, 0, 0, 0}, second[8] = {1, 0, 1, 1, 0, 0, 0, 0};
    begin(0);
    int on_second = CALL(cuMemCreate, &handle, bytes, second, (u64)0);
    int on_first = CALL(cuMemCreate, &handle, bytes, first, (u64)0);
    MUST(cuCtxCreate_v2, &context, 0, 1);
    int in_second = allocate("alloc", bytes, &address);
    printf("%d %d %d %d\n", on_second, on_first, in_second, CALL(cuMemCreate, &handle, bytes, first, (u64)0));
  } else if (!strcmp(command, "null")) {
    begin(0);
    size_t total = 0;
    int without_free = CALL(cuMemGetInfo_v2, NULL, &total);
    printf("%d %d %d\n", without_free, CALL(cuMemAlloc_v2, NULL, (size_t)1) != 0,
           CALL(cuMemCreate, &total, (size_t)1, NULL, (u64)0) != 0);
  } else if (!strcmp(command, "spin")) {
    begin(0);
    spin(argv[3], atoi(argv[4]), atoi(argv[5]));
  } else if (!strcmp(command, "launches")) {
    begin(0);
    launches(argv[3], atol(argv[4]), atoi(argv[5]));
  } else if (!strcmp(command, "allocations")) {
    /* Physical memory, which the simulated driver does not map: a mapping would dominate the cost. */
    u64 handle;
    int properties[8] = {1, 0, 1, 0, 0, 0, 0, 0};
    fn create = find("cuMemCreate"), release_memory = find("cuMemRelease");
    begin(0);
    REPEAT(atol(argv[5]), SAFE(create(&handle, bytes, properties, (u64)0)); SAFE(release_memory(handle)));
  } else if (!strcmp(command, "graph")) {
    u64 stream;
    struct kernel kernel;
    begin(0);
    load(&kernel, argv[3]);
    MUST(cuStreamCreate, &stream, 1);
    u64 executable = captured(&kernel, stream);
    fn launch = find("cuGraphLaunch");
    long launches = 0;
    u64 start = now();
    for (; now() < start + strtoull(argv[4], NULL, 10) * 1000000; launches++) SAFE(launch(executable, (void *)stream));
    if (find("cuCtxSynchronize")()) return 4;
    u64 ns = now() - start;
    printf("%ld %llu %llu\n", launches, ns, busy_ns(&kernel));
  } else if (!strcmp(command, "calibrate")) {
    begin(0);
    calibrate();
  } else if (!strcmp(command, "nvml")) {
    void *nvml = dlopen("libnvidia-ml.so.1", RTLD_NOW);
    void *device;
    struct { u64 total, free, used; } memory;
    u64 address;
    begin(0);
    if (!nvml || allocate("alloc", bytes, &address)) return 11;
    ((fn)dlsym(nvml, "nvmlInit_v2"))();
    ((fn)dlsym(nvml, "nvmlDeviceGetHandleByIndex_v2"))(0, &device);
    ((fn)dlsym(nvml, "nvmlDeviceGetMemoryInfo"))(device, &memory);
    printf("%llu %llu %llu\n", memory.total, memory.free, memory.used);
  } else {
    return 12;
  }
  return 0;
}
