//! C programs with the shim and the simulated driver, or a real one with `MAYFLY_TEST_GPU=real`: all kinds of allocation and lookup, forks, crashes, changed
//! limits, and shares of GPU time.

use std::process::Stdio;

use mayfly_gpu_proto::{DeviceLimit, LIMITS_ENV};

#[path = "support/container.rs"]
mod container;
use container::LimitedContainer;

const MIB: u64 = 1 << 20;
/// How programs find the driver's functions: linked; by `dlsym` in a library opened with `RTLD_LOCAL`, or among all
/// libraries; by `cuGetProcAddress` of CUDA 12, there also for per-thread default streams, of CUDA 11, and of CUDA 13.
const LOADINGS: [&str; 7] = ["linked", "dlsym", "global", "address", "thread", "address1", "address13"];

#[test]
fn every_way_to_allocate_is_limited_exactly() {
    let Some(container) = LimitedContainer::new("every_way_to_allocate", 64 * MIB, 0) else { return };
    let kinds = ["alloc", "managed", "pitch", "async", "create", "array", "array3d", "mipmapped", "pool"];
    // A real GPU has no array of one dimension that is as large.
    let line = container.sim.is_some().then_some("line");
    for kind in kinds.into_iter().chain(line) {
        for loading in LOADINGS {
            let half = (32 * MIB).to_string();
            let seen = container.run(&[loading, "halves", kind, &half]);
            assert_eq!(seen, "0 0 2 0 0 2 1 0 2", "{kind} by {loading}");
        }
    }
}

#[test]
fn one_byte_more_than_the_limit_is_refused_and_null_is_the_drivers_business() {
    let Some(container) = LimitedContainer::new("one_byte_more", MIB, 0) else { return };
    assert_eq!(container.spawn(&["dlsym", "take", "alloc", &(MIB + 1).to_string()]).line(), "2");
    assert_eq!(container.spawn(&["dlsym", "take", "alloc", &MIB.to_string()]).line(), "0");
    assert_eq!(container.run(&["dlsym", "null"]), "0 1 1");
}

#[test]
fn sizes_are_those_of_the_limit() {
    let Some(container) = LimitedContainer::new("sizes", 64 * MIB, 0) else { return };
    let whole = container.sim.as_ref().map_or(0, |sim| sim.describe(1).memory_bytes);
    for loading in LOADINGS {
        let seen = container.run(&[loading, "info"]);
        assert_eq!(seen, format!("{0} {0} {0} {whole}", 64 * MIB), "{loading}");
    }
    let seen = container.run(&["dlsym", "nvml", "x", &(16 * MIB).to_string()]);
    assert_eq!(seen, format!("{} {} {}", 64 * MIB, 48 * MIB, 16 * MIB));
}

#[test]
fn processes_of_a_container_share_its_limit_and_a_crash_returns_its_part() {
    let Some(container) = LimitedContainer::new("processes_share", 64 * MIB, 0) else { return };
    let bytes = (40 * MIB).to_string();
    let mut first = container.spawn(&["dlsym", "take", "alloc", &bytes]);
    assert_eq!(first.line(), "0");
    assert_eq!(container.limits.usage()[0].memory_bytes, 40 * MIB);
    let mut second = container.spawn(&["address", "again", "alloc", &bytes]);
    assert_eq!(second.ask(), "2");
    first.kill();
    assert_eq!(second.ask(), "0");
    drop(second);
    let crashed = container.command(&["dlsym", "crash", "create", &(40 * MIB).to_string()]).output().unwrap();
    assert_eq!((crashed.status.code(), crashed.stdout.as_slice()), (None, b"0\n".as_slice()));
    assert_eq!(container.run(&["linked", "halves", "alloc", &(32 * MIB).to_string()]), "0 0 2 0 0 2 1 0 2");
}

/// Programs that allocate at the same time get exactly what fits.
#[test]
fn a_race_of_processes_does_not_exceed_the_limit() {
    // A pool takes 32 MiB for 20.
    for (kind, fitting) in [("alloc", 3), ("create", 3), ("async", 2)] {
        let Some(container) = LimitedContainer::new("a_race", 64 * MIB, 0) else { return };
        let bytes = (20 * MIB).to_string();
        let mut programs: Vec<_> =
            (0..8).map(|_| container.spawn(&["address", "take", kind, &bytes])).collect();
        let mut codes: Vec<_> = programs.iter_mut().map(|program| program.line()).collect();
        codes.sort();
        let expected: Vec<_> = (0..8).map(|index| if index < fitting { "0" } else { "2" }).collect();
        assert_eq!(codes, expected, "{kind}");
        assert!(container.limits.usage()[0].memory_bytes <= 64 * MIB, "{kind}");
    }
}

#[test]
fn memory_counts_for_its_own_device() {
    let Some(container) = LimitedContainer::new("its_own_device", 64 * MIB, 0) else { return };
    if container.simulation("its_own_device").is_none() {
        return;
    }
    for loading in ["dlsym", "address"] {
        assert_eq!(
            container.run(&[loading, "devices", "x", &(100 * MIB).to_string()]),
            "0 2 0 2",
            "{loading}"
        );
    }
}

#[test]
fn a_limit_changes_in_place() {
    let Some(container) = LimitedContainer::new("a_limit_changes", 64 * MIB, 0) else { return };
    let mut program = container.spawn(&["dlsym", "again", "alloc", &(40 * MIB).to_string()]);
    assert_eq!((program.ask(), program.ask()), ("0".into(), "2".into()));
    let limit = container.limits.usage().remove(0).limit;
    container.limits.set_limit(&DeviceLimit { memory_bytes: 80 * MIB, ..limit.clone() }).unwrap();
    assert_eq!((program.ask(), program.ask()), ("0".into(), "2".into()));
    container.limits.set_limit(&DeviceLimit { memory_bytes: 0, ..limit }).unwrap();
    assert_eq!(program.ask(), "0");
}

#[test]
fn forks_execs_and_threads_are_counted() {
    let Some(container) = LimitedContainer::new("forks", 64 * MIB, 0) else { return };
    let most = (40 * MIB).to_string();
    for loading in LOADINGS {
        assert_eq!(container.run(&[loading, "fork", "x", &most]), "0 2 0", "{loading}");
    }
    let mut program = container.spawn(&["dlsym", "exec", "x", &most]);
    assert_eq!(program.line(), "0", "the memory of the program before the exec is gone");
    drop(program);
    assert_eq!(container.run(&["dlsym", "threads", "x", &(20 * MIB).to_string()]), "1 0");
}

#[test]
fn physical_memory_counts_while_it_is_mapped_and_pools_are_trimmed() {
    let Some(container) = LimitedContainer::new("physical_memory", 64 * MIB, 0) else { return };
    let most = (40 * MIB).to_string();
    assert_eq!(container.run(&["address", "mapped", "x", &most]), "0 2 0");
    let seen = container.run(&["dlsym", "keep", "x", &most]);
    assert_eq!(seen, "0 0 1 0", "a pool's free memory counts, until it is needed");
    assert_eq!(container.run(&["address", "capture", "x", &most]), "0 2 0");
}

#[test]
fn a_broken_limits_file_refuses_and_none_allows() {
    let Some(container) = LimitedContainer::new("a_broken_file", 64 * MIB, 0) else { return };
    let arguments = ["dlsym", "take", "alloc", "1048576"];
    let mut broken = container.command(&arguments);
    let output = broken.env(LIMITS_ENV, "/nowhere").stdin(Stdio::null()).output().unwrap();
    assert_eq!(output.stdout, b"2\n");
    let mut none = container.command(&["dlsym", "take", "alloc", "100000000"]);
    let output = none.env_remove(LIMITS_ENV).stdin(Stdio::null()).output().unwrap();
    assert_eq!(output.stdout, b"0\n");
}

/// A program may get less when the machine is busy, but never more.
#[track_caller]
fn assert_share(got: f64, percent: u32) {
    let percent = f64::from(percent);
    assert!(got < percent * 1.05, "{got} % is more than {percent} %");
    assert!(got > percent * 0.4, "{got} % is much less than {percent} %");
}

#[test]
fn one_program_gets_its_share() {
    for (percent, kernel, batch) in
        [(10, "work_1ms", "1"), (25, "work_200us", "0"), (50, "work_3ms", "0"), (90, "work_500us", "10")]
    {
        let Some(container) = LimitedContainer::new("one_program", 0, percent) else { return };
        let text = container.run(&["address", "spin", kernel, "2000", batch]);
        assert_share(container.share(&text), percent);
    }
}

#[test]
fn launches_of_every_lookup_are_counted() {
    for loading in ["linked", "global", "thread", "address1", "address13"] {
        let Some(container) = LimitedContainer::new("launches_of_every_lookup", 0, 25) else { return };
        let text = container.run(&[loading, "spin", "work_1ms", "2000", "1"]);
        assert_share(container.share(&text), 25);
    }
}

#[test]
fn a_graph_costs_what_it_runs() {
    let Some(container) = LimitedContainer::new("a_graph", 0, 25) else { return };
    let text = container.run(&["dlsym", "graph", "work_500us", "2000"]);
    assert_share(container.share(&text), 25);
}

#[test]
fn two_containers_share_a_gpu_by_their_quotas() {
    let Some(small) = LimitedContainer::new("two_containers", 0, 30) else { return };
    let Some(large) = LimitedContainer::new("two_containers", 0, 70) else { return };
    let spin = |container: &LimitedContainer| {
        container.limits.region().devices()[0].contended.store(1, std::sync::atomic::Ordering::Relaxed);
        let mut command = container.command(&["address", "spin", "work_1ms", "2000", "1"]);
        small.lend_gpus(&mut command);
        command.stdout(Stdio::piped()).spawn().unwrap()
    };
    let (first, second) = (spin(&small), spin(&large));
    for (program, percent) in [(first, 30), (second, 70)] {
        let output = program.wait_with_output().unwrap();
        let text = String::from_utf8(output.stdout).unwrap();
        let numbers: Vec<f64> = text.split_whitespace().map(|number| number.parse().unwrap()).collect();
        assert_share(numbers[0] * 1e6 * 100.0 / numbers[1], percent);
    }
}
