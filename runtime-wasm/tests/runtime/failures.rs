//! Misbehaving guests: each ends with its own error, in time, without an effect on the others. The components are text,
//! so that no toolchain is needed.

use std::time::{Duration, Instant};

use crate::support::{
    text::{TEXT_AT, handler},
    *,
};
use mayfly_api::{Digest, function::Isolation};
use mayfly_runtime::{CallError, FunctionHost as _};

const ANSWERS: &str = r#"(func (export "handle") (param i32 i32) (call $answer (local.get 1)))"#;
const SPINS: &str = r#"(func (export "handle") (param i32 i32) (loop $again (br $again)))"#;

#[tokio::test(flavor = "multi_thread")]
async fn a_guest_that_answers() {
    let fixture = WasmHostFixture::new();
    let function = fixture.function(handler(ANSWERS), |_| {}).await;
    for _ in 0..3 {
        let (status, body) = ask(&function, "/").await;
        assert_eq!((status.as_u16(), body.as_str()), (200, ""));
    }
    fixture.settled().await;
    let metrics = fixture.metrics();
    let answered = r#"mayfly_wasm_calls_total{namespace="default",function="f",outcome="Answered"}"#;
    assert_eq!(metric(&metrics, answered), 3.0);
    assert_eq!(metric(&metrics, "mayfly_wasm_components_loaded "), 1.0);
    assert_eq!(metric(&metrics, "mayfly_wasm_instances "), 0.0);
    assert_eq!(metric(&metrics, "mayfly_wasm_memory_used_bytes "), 0.0);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_trap_is_reported_with_its_location() {
    let fixture = WasmHostFixture::new();
    let module = r#"(func $parse_header unreachable)
        (func (export "handle") (param i32 i32) (call $parse_header))"#;
    let function = fixture.function(handler(module), |_| {}).await;
    let error = call(&function, get("/")).await.err().unwrap();
    let CallError::Trapped(what) = error else { panic!("{error}") };
    assert!(what.contains("unreachable") && what.contains("parse_header"), "{what}");
    assert!(fixture.log("f").contains("parse_header"), "the function's log tells, too");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_guest_that_returns_without_answering() {
    let fixture = WasmHostFixture::new();
    let module = r#"(func (export "handle") (param i32 i32))"#;
    let function = fixture.function(handler(module), |_| {}).await;
    assert_eq!(call(&function, get("/")).await.err().unwrap(), CallError::NoAnswer);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_guest_that_answers_twice_has_answered_once() {
    let fixture = WasmHostFixture::new();
    let module = r#"(func (export "handle") (param i32 i32) (call $answer (local.get 1)) (call $answer (local.get 1)))"#;
    let function = fixture.function(handler(module), |_| {}).await;
    let answer = call(&function, get("/")).await.unwrap();
    assert_eq!(answer.response.status(), 200, "what the client has stays");
    eventually("the log tells", || fixture.log("f").contains("trapped")).await;
}

/// One thread: a guest that blocked it would block all others.
#[tokio::test]
async fn a_spinning_guest_ends_at_its_deadline_without_blocking_others() {
    let fixture = WasmHostFixture::new();
    let limit = Duration::from_millis(300);
    let spins = fixture.function(handler(SPINS), |spec| spec.timeout = limit).await;
    spins.load().await.unwrap();
    let other = fixture.upload(handler(ANSWERS)).await;
    let other = fixture.host.prepare(spec("other", other));
    other.load().await.unwrap();
    // Far longer than ten answers take: a guest that blocked the thread would end before the second answer.
    let long = spins.clone();
    let spinning =
        tokio::spawn(async move { call_within(&long, get("/"), Duration::from_secs(20)).await.map(drop) });
    for _ in 0..10 {
        ask(&other, "/").await;
        tokio::task::yield_now().await;
    }
    assert!(!spinning.is_finished(), "neighbours waited until it ended");
    spinning.abort();
    let started = Instant::now();
    let error = call_within(&spins, get("/"), limit).await.err().unwrap();
    assert_eq!(error, CallError::TimedOut { limit });
    assert!(started.elapsed() < Duration::from_secs(10), "{limit:?} became {:?}", started.elapsed());
    eventually("the slot is free", || fixture.instances() == 0.0).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_guest_that_wants_more_memory_than_its_limit() {
    let fixture = WasmHostFixture::new();
    // Memory 1 of the test component has one page; the limit applies to both memories together.
    let module = r#"(memory 1)
        (func (export "handle") (param i32 i32)
          (loop $again (br_if $again (i32.ne (memory.grow (i32.const 16)) (i32.const -1))))
          unreachable)"#;
    let function = fixture.function(handler(module), |spec| spec.memory_bytes_max = 8 << 20).await;
    let error = call(&function, get("/")).await.err().unwrap();
    assert_eq!(error, CallError::OutOfMemory { limit_bytes: 8 << 20 });
    let peak = metric(&fixture.metrics(), "mayfly_wasm_memory_peak_bytes_sum");
    assert!((7e6..=8.4e6).contains(&peak), "it used what it may: {peak}");
    // The initial memory counts, too.
    let module = r#"(memory 200) (func (export "handle") (param i32 i32))"#;
    let function = fixture.function(handler(module), |spec| spec.memory_bytes_max = 8 << 20).await;
    let error = call(&function, get("/")).await.err().unwrap();
    assert_eq!(error, CallError::OutOfMemory { limit_bytes: 8 << 20 });
}

/// Memory outside linear memories counts, too: 128 MiB of headers are ten times this guest's limit.
#[tokio::test(flavor = "multi_thread")]
async fn host_memory_of_a_guest_counts_towards_its_limit() {
    let fixture = WasmHostFixture::new();
    let module = format!(
        r#"(func (export "handle") (param $request i32) (param $out i32)
          (local $left i32) (local $held i32) (local $times i32)
          (local.set $left (i32.const 2000))
          (loop $more
            (local.set $held (call $fields))
            (local.set $times (i32.const 16))
            (loop $again
              (call $append (local.get $held) (i32.const {TEXT_AT}) (i32.const 4)
                (i32.const {TEXT_AT}) (i32.const {TEXT_AT}) (i32.const 0))
              (local.set $times (i32.sub (local.get $times) (i32.const 1)))
              (br_if $again (local.get $times)))
            (local.set $left (i32.sub (local.get $left) (i32.const 1)))
            (br_if $more (local.get $left)))
          (call $answer (local.get $out)))"#
    );
    let limit_bytes = 12 << 20;
    let function = fixture.function(handler(&module), |spec| spec.memory_bytes_max = limit_bytes).await;
    assert_eq!(call(&function, get("/")).await.err(), Some(CallError::OutOfMemory { limit_bytes }));
    eventually("all is given back", || metric(&fixture.metrics(), "mayfly_wasm_memory_used_bytes ") == 0.0)
        .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn tables_count_as_memory() {
    let fixture = WasmHostFixture::new();
    let module = r#"(table 100000 funcref)
        (func (export "handle") (param i32 i32) (call $answer (local.get 1)))"#;
    let limit_bytes = 512 << 10;
    let function = fixture.function(handler(module), |spec| spec.memory_bytes_max = limit_bytes).await;
    assert_eq!(call(&function, get("/")).await.err(), Some(CallError::OutOfMemory { limit_bytes }));
    let function = fixture.function(handler(module), |spec| spec.memory_bytes_max = 2 << 20).await;
    assert_eq!(ask(&function, "/").await.0, 200);
}

#[tokio::test(flavor = "multi_thread")]
async fn memory_over_all_instances_is_bounded() {
    let fixture =
        WasmHostFixture::with(mayfly_runtime_wasm::Config { memory_bytes_max: Some(4 << 20), ..small() });
    let module = r#"(memory 100) (func (export "handle") (param i32 i32) (call $answer (local.get 1)))"#;
    let function = fixture.function(handler(module), |_| {}).await;
    let error = call(&function, get("/")).await.err().unwrap();
    assert!(matches!(error, CallError::Overloaded { .. }), "{error}");
    assert_eq!(metric(&fixture.metrics(), "mayfly_wasm_memory_used_bytes "), 0.0);
}

#[tokio::test(flavor = "multi_thread")]
async fn dropping_a_call_ends_its_guest() {
    let fixture = WasmHostFixture::new();
    let function = fixture.function(handler(SPINS), |_| {}).await;
    function.load().await.unwrap();
    let calling = tokio::spawn(async move { call(&function, get("/")).await.map(|_| ()) });
    eventually("it runs", || fixture.instances() == 1.0).await;
    calling.abort();
    eventually("it is gone", || fixture.instances() == 0.0).await;
    let cancelled = r#"mayfly_wasm_calls_total{namespace="default",function="f",outcome="Cancelled"} 1"#;
    eventually("it is counted", || fixture.metrics().contains(cancelled)).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn calls_wait_for_a_slot_and_are_eventually_refused() {
    let fixture = WasmHostFixture::with(mayfly_runtime_wasm::Config {
        instances_max: Some(2),
        slot_wait_max: Duration::from_millis(100),
        ..small()
    });
    let function = fixture.function(handler(SPINS), |_| {}).await;
    function.load().await.unwrap();
    let spinning: Vec<_> = (0..2)
        .map(|_| {
            let function = function.clone();
            tokio::spawn(
                async move { call_within(&function, get("/"), Duration::from_secs(600)).await.map(drop) },
            )
        })
        .collect();
    eventually("both run", || fixture.instances() == 2.0).await;
    let error = call(&function, get("/")).await.err().unwrap();
    assert!(matches!(error, CallError::NoSlot { held: 2, max: 2, .. }), "{error}");
    for task in spinning {
        task.abort();
    }
    eventually("both are gone", || fixture.instances() == 0.0).await;
    let other = fixture.upload(handler(ANSWERS)).await;
    ask(&fixture.host.prepare(spec("other", other)), "/").await;
}

#[tokio::test(flavor = "multi_thread")]
async fn idle_instances_give_their_slots_to_others() {
    let fixture = WasmHostFixture::with(mayfly_runtime_wasm::Config { instances_max: Some(1), ..small() });
    let component = fixture.upload(handler(ANSWERS)).await;
    for name in ["a", "b", "a"] {
        let mut spec = spec(name, component);
        spec.isolation = Isolation::Reuse;
        ask(&fixture.host.prepare(spec), "/").await;
        fixture.settled().await;
        assert_eq!(fixture.instances(), 1.0, "{name}'s instance stays");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_needed_slot_is_taken_from_the_longest_idle_function() {
    let fixture = WasmHostFixture::with(mayfly_runtime_wasm::Config { instances_max: Some(3), ..small() });
    let component = fixture.upload(handler(ANSWERS)).await;
    for name in ["a", "b", "c", "d"] {
        let mut spec = spec(name, component);
        spec.isolation = Isolation::Reuse;
        ask(&fixture.host.prepare(spec), "/").await;
        fixture.settled().await;
    }
    assert_eq!(fixture.instances(), 3.0, "those of b and c stay beside that of d");
}

/// All slots are in use when the second call needs one: the instance that ends then must not be kept idle unnoticed.
#[tokio::test(flavor = "multi_thread")]
async fn an_ended_instance_gives_its_slot_to_a_waiting_call() {
    let fixture = WasmHostFixture::with(mayfly_runtime_wasm::Config {
        instances_max: Some(1),
        slot_wait_max: Duration::from_secs(60),
        ..small()
    });
    let works = r#"(func (export "handle") (param $request i32) (param $out i32) (local $left i32)
        (local.set $left (i32.const 400000000))
        (loop $again
          (local.set $left (i32.sub (local.get $left) (i32.const 1)))
          (br_if $again (local.get $left)))
        (call $answer (local.get $out)))"#;
    let mut functions = Vec::new();
    for (name, module) in [("busy", works), ("waits", ANSWERS)] {
        let mut spec = spec(name, fixture.upload(handler(module)).await);
        spec.isolation = Isolation::Reuse;
        spec.timeout = Duration::from_secs(60);
        let function = fixture.host.prepare(spec);
        function.load().await.unwrap();
        functions.push(function);
    }
    let [busy, waits] = functions.try_into().ok().unwrap();
    let long = Duration::from_secs(60);
    let calling = tokio::spawn(async move { call_within(&busy, get("/"), long).await.map(drop) });
    eventually("it works", || fixture.instances() == 1.0).await;
    let started = Instant::now();
    call_within(&waits, get("/"), long).await.unwrap();
    assert!(started.elapsed() < Duration::from_secs(50), "it waited {:?}", started.elapsed());
    calling.await.unwrap().unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn an_instance_is_reused_until_it_expires_or_fails() {
    let fixture = WasmHostFixture::with(mayfly_runtime_wasm::Config { reuse_calls_max: 3, ..small() });
    // Traps at the third call of one instance: `count` is zero only in a new instance.
    let module = r#"(global $count (mut i32) (i32.const 0))
        (func (export "handle") (param i32 i32)
          (global.set $count (i32.add (global.get $count) (i32.const 1)))
          (if (i32.eq (global.get $count) (i32.const 3)) (then unreachable))
          (call $answer (local.get 1)))"#;
    let function = fixture.function(handler(module), |spec| spec.isolation = Isolation::Reuse).await;
    let mut outcomes = Vec::new();
    for _ in 0..6 {
        outcomes.push(call(&function, get("/")).await.is_ok());
        fixture.settled().await;
    }
    assert_eq!(outcomes, [true, true, false, true, true, false], "one that trapped is not used again");
    let function = fixture.function(handler(ANSWERS), |spec| spec.isolation = Isolation::Reuse).await;
    for _ in 0..3 {
        ask(&function, "/").await;
        fixture.settled().await;
    }
    assert_eq!(metric(&fixture.metrics(), "mayfly_wasm_instances_recycled_total"), 1.0);
}

#[tokio::test(flavor = "multi_thread")]
async fn an_instance_that_retains_handles_is_replaced_before_a_call_fails() {
    let fixture = WasmHostFixture::new();
    // Each call leaves 50 fields and its request behind; 8,192 handles are allowed.
    let module = r#"(func (export "handle") (param i32 i32) (local $left i32)
        (local.set $left (i32.const 50))
        (loop $again
          (drop (call $fields))
          (local.set $left (i32.sub (local.get $left) (i32.const 1)))
          (br_if $again (local.get $left)))
        (call $answer (local.get 1)))"#;
    let function = fixture.function(handler(module), |spec| spec.isolation = Isolation::Reuse).await;
    for at in 0..400 {
        assert_eq!(call(&function, get("/")).await.map(drop), Ok(()), "call {at}");
        fixture.settled().await;
    }
    let recycled = metric(&fixture.metrics(), "mayfly_wasm_instances_recycled_total");
    assert!((1.0..10.0).contains(&recycled), "{recycled} instances were replaced");
}

#[tokio::test(flavor = "multi_thread")]
async fn invalid_components_are_rejected_with_a_reason() {
    let fixture = WasmHostFixture::new();
    let missing = fixture.host.prepare(spec("missing", Digest::of(b"nothing")));
    assert_eq!(
        call(&missing, get("/")).await.err().unwrap(),
        CallError::ComponentMissing(Digest::of(b"nothing"))
    );
    for (content, word) in [
        (b"#!/bin/sh".to_vec(), "not a wasm file"),
        (wat::parse_str("(module)").unwrap(), "core module"),
        (wat::parse_str("(component)").unwrap(), "exports none of"),
        (
            wat::parse_str(r#"(component (import "acme:db/sql@1.0.0" (instance)))"#).unwrap(),
            "acme:db/sql@1.0.0",
        ),
        (text::command(r#"(func (export "run") (result i32) (i32.const 0))"#), "program"),
    ] {
        let function = fixture.function(content, |_| {}).await;
        let error = call(&function, get("/")).await.err().unwrap();
        let CallError::ComponentInvalid(why) = error else { panic!("{error}") };
        assert!(why.contains(word), "{why}");
    }
}

/// Each instance has room for its memories, independently of other instances.
#[tokio::test(flavor = "multi_thread")]
async fn a_component_with_more_memories_than_a_slot_is_rejected() {
    let fixture = WasmHostFixture::with(mayfly_runtime_wasm::Config { instances_max: Some(8), ..small() });
    // The test component has one more.
    let module = |memories: usize| format!("{} {SPINS}", "(memory 0) ".repeat(memories - 1));
    let function = fixture.function(handler(&module(5)), |_| {}).await;
    let error = call(&function, get("/")).await.err().unwrap();
    let CallError::ComponentInvalid(why) = error else { panic!("{error}") };
    assert!(why.contains("5 linear memories"), "{why}");
    let function = fixture.function(handler(&module(4)), |_| {}).await;
    function.load().await.unwrap();
    let spinning: Vec<_> = (0..8)
        .map(|_| {
            let function = function.clone();
            tokio::spawn(
                async move { call_within(&function, get("/"), Duration::from_secs(600)).await.map(drop) },
            )
        })
        .collect();
    eventually("all run", || fixture.instances() == 8.0).await;
    assert!(spinning.iter().all(|call| !call.is_finished()));
    for task in spinning {
        task.abort();
    }
    eventually("all are gone", || fixture.instances() == 0.0).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn an_import_with_another_type_is_named() {
    let fixture = WasmHostFixture::new();
    let text = r#"(component
        (import "wasi:random/insecure@0.2.0" (instance (export "get-insecure-random-u64" (func (result string)))))
        (core module $m (func (export "run") (result i32) (i32.const 0)))
        (core instance $i (instantiate $m))
        (func $run (result (result)) (canon lift (core func $i "run")))
        (instance $exported (export "run" (func $run)))
        (export "wasi:cli/run@0.2.0" (instance $exported)))"#;
    let function = fixture.function(wat::parse_str(text).unwrap(), |_| {}).await;
    let error = call(&function, get("/")).await.err().unwrap();
    let CallError::ComponentInvalid(why) = error else { panic!("{error}") };
    assert!(why.contains("wasi:random/insecure@0.2.0") && why.contains("get-insecure-random-u64"), "{why}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_stopped_host_refuses() {
    let fixture = WasmHostFixture::new();
    let function = fixture.function(handler(ANSWERS), |_| {}).await;
    ask(&function, "/").await;
    fixture.host.stop();
    assert_eq!(call(&function, get("/")).await.err().unwrap(), CallError::ShuttingDown);
}
