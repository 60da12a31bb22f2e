//! A function that uses much processor time does not slow down others.

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use mayfly_runtime::{CallError, HostedFunction};
use mayfly_runtime_wasm::Config;

use crate::support::{text::handler, *};

const SECOND: Duration = Duration::from_secs(1);

/// Answers at once.
const QUICK: &str = r#"(func (export "handle") (param i32 i32) (call $answer (local.get 1)))"#;
/// Never yields its thread.
const SPINS: &str = r#"(func (export "handle") (param i32 i32) (loop $again (br $again)))"#;
/// The same with single long-running instructions.
const FILLS: &str = r#"(memory 800)
    (func (export "handle") (param i32 i32)
      (loop $again (memory.fill (i32.const 0) (i32.const 1) (i32.const 50000000)) (br $again)))"#;
/// Touches new memory as fast as possible, then ends.
const ALLOCATES: &str = r#"(memory 1)
    (func (export "handle") (param i32 i32) (local $at i32)
      (drop (memory.grow (i32.const 700)))
      (loop $again
        (i32.store (local.get $at) (i32.const 1))
        (local.set $at (i32.add (local.get $at) (i32.const 4096)))
        (br_if $again (i32.lt_u (local.get $at) (i32.const 45000000))))
      (call $answer (local.get 1)))"#;

async fn function(fixture: &WasmHostFixture, name: &str, module: &str) -> Arc<dyn HostedFunction> {
    let component = fixture.upload(handler(module)).await;
    use mayfly_runtime::FunctionHost as _;
    fixture.host.prepare(spec(name, component))
}

/// Calls a function next to four neighbours that are called in a loop, until `time` is over; returns the number of
/// answers.
async fn answers_beside(neighbour: &str, time: Duration) -> u32 {
    let fixture = WasmHostFixture::new();
    let victim = function(&fixture, "victim", QUICK).await;
    let neighbour = function(&fixture, "neighbour", neighbour).await;
    ask(&victim, "/").await;
    // Compiled before the clock starts.
    call_within(&neighbour, get("/"), SECOND / 10).await.ok();
    let neighbours: Vec<_> = (0..4)
        .map(|_| {
            let neighbour = neighbour.clone();
            tokio::spawn(async move {
                loop {
                    call_within(&neighbour, get("/"), SECOND / 2).await.ok();
                }
            })
        })
        .collect();
    let started = Instant::now();
    let mut answers = 0;
    while started.elapsed() < time {
        // The caller is a task like the neighbours' callers, as connections are.
        let victim = victim.clone();
        tokio::spawn(async move { ask(&victim, "/").await }).await.unwrap();
        answers += 1;
    }
    neighbours.iter().for_each(tokio::task::JoinHandle::abort);
    fixture.settled().await;
    answers
}

/// With one serving thread each call would wait for the slices of all four neighbours, at least 5 ms each, so there
/// would be at most 50 answers a second. Without neighbours there are several thousand.
#[tokio::test]
async fn computing_neighbours_leave_the_serving_thread_to_others() {
    for neighbour in [SPINS, FILLS, ALLOCATES] {
        let answers = answers_beside(neighbour, SECOND).await;
        assert!(answers > 150, "{answers} answers in a second beside {neighbour}");
    }
}

#[tokio::test]
async fn a_bulk_instruction_is_interrupted_at_the_deadline() {
    let fixture = WasmHostFixture::with(Config { instances_max: Some(4), ..Config::default() });
    // One instruction that would take a second or more if it were not split: 2 GiB of new memory.
    let fills = r#"(memory 32768)
        (func (export "handle") (param i32 i32)
          (memory.fill (i32.const 0) (i32.const 1) (i32.const 2147483647))
          (call $answer (local.get 1)))"#;
    let function = fixture.function(handler(fills), |spec| spec.memory_bytes_max = 3 << 30).await;
    function.load().await.unwrap();
    let started = Instant::now();
    let error = call_within(&function, get("/"), SECOND / 20).await.err();
    assert!(matches!(error, Some(CallError::TimedOut { .. })), "{error:?}");
    fixture.settled().await;
    // The caller does not await the end of the instance, which must come soon as well.
    let took = started.elapsed();
    let memory = metric(&fixture.metrics(), "mayfly_wasm_memory_peak_bytes_sum");
    assert!(took < SECOND * 5, "{took:?} {memory}");
}

#[tokio::test(flavor = "multi_thread")]
async fn one_slow_function_leaves_slots_to_others() {
    let fixture = WasmHostFixture::with(Config { instances_max: Some(32), slot_wait_max: SECOND, ..small() });
    let slow = function(&fixture, "slow", SPINS).await;
    let quick = function(&fixture, "quick", QUICK).await;
    slow.load().await.unwrap();
    let calls: Vec<_> = (0..40)
        .map(|_| {
            let slow = slow.clone();
            tokio::spawn(async move { call_within(&slow, get("/"), 5 * SECOND).await })
        })
        .collect();
    eventually("the slow function has its share", || fixture.instances() == 16.0).await;
    for _ in 0..20 {
        assert_eq!(ask(&quick, "/").await.0, 200);
    }
    // Calls that got no slot in time have failed with an error.
    let mut refused = 0;
    for call in calls {
        match call.await.unwrap() {
            Err(CallError::NoSlot { held: 16, max: 32, .. }) => refused += 1,
            Err(CallError::TimedOut { .. }) => {}
            other => panic!("{:?}", other.err()),
        }
    }
    assert_eq!(refused, 24);
}

/// A call in the pool returns the same as on a serving thread: the complete body, followed by the error.
#[tokio::test(flavor = "multi_thread")]
async fn long_calls_answer_like_short_ones() {
    let spins_first = |then: &str| {
        format!(
            r#"(func (export "handle") (param i32 i32) (local $n i32)
              (loop $again
                (local.set $n (i32.add (local.get $n) (i32.const 1)))
                (br_if $again (i32.lt_u (local.get $n) (i32.const 40000000))))
              {then})"#
        )
    };
    let fixture = WasmHostFixture::new();
    let answers = function(&fixture, "answers", &spins_first("(call $answer (local.get 1))")).await;
    let traps = function(&fixture, "traps", &spins_first("unreachable")).await;
    let both =
        function(&fixture, "both", &spins_first("(call $answer (local.get 1)) (loop $a (br $a))")).await;
    for _ in 0..3 {
        let answer = call(&answers, get("/")).await.unwrap();
        use http_body::Body as _;
        assert_eq!(answer.response.body().size_hint().exact(), Some(0), "the whole answer was there");
        assert!(matches!(call(&traps, get("/")).await, Err(CallError::Trapped(_))));
        assert_eq!(call_within(&both, get("/"), SECOND).await.unwrap().response.status(), 200);
    }
    assert!(metric(&fixture.metrics(), "mayfly_wasm_long_calls_total") >= 9.0);
    fixture.settled().await;
}
