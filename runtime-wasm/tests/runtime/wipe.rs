//! No instance sees data of another. Each guest checks all of its memory, tables and globals, traps if anything differs
//! from the initial state, and then fills all of it.

use std::sync::Arc;

use crate::support::{text::handler, *};
use mayfly_runtime::{CallError, FunctionHost as _, HostedFunction};
use mayfly_runtime_wasm::{Config, config::Wipe};

/// `pages` initially, and as many as it can get later; `data` bytes of them are initialised by the component. Returns
/// without an answer if everything had its initial state.
fn filler(pages: u32, data: usize) -> Vec<u8> {
    let text = "d".repeat(data);
    handler(&format!(
        r#"(memory $m {pages})
        (data (i32.const 4096) "{text}")
        (table $t 600 funcref)
        (elem (table $t) (i32.const 0) func $f)
        (global $g (mut i64) (i64.const 1234567))
        (func $f)
        (func $clean (param $from i32) (param $to i32)
          (block $done (loop $next
            (br_if $done (i32.ge_u (local.get $from) (local.get $to)))
            (if (i64.ne (i64.load (local.get $from)) (i64.const 0)) (then unreachable))
            (local.set $from (i32.add (local.get $from) (i32.const 8)))
            (br $next))))
        (func $fill (param $from i32) (param $to i32)
          (memory.fill (local.get $from) (i32.const 0xa5) (i32.sub (local.get $to) (local.get $from))))
        (func $data (param $at i32)
          (block $done (loop $next
            (br_if $done (i32.ge_u (local.get $at) (i32.const {data_end})))
            (if (i32.ne (i32.load8_u (local.get $at)) (i32.const 100)) (then unreachable))
            (local.set $at (i32.add (local.get $at) (i32.const 1)))
            (br $next))))
        (func $tables (param $at i32)
          (if (ref.is_null (table.get $t (i32.const 0))) (then unreachable))
          (block $done (loop $next
            (br_if $done (i32.ge_u (local.get $at) (table.size $t)))
            (if (i32.eqz (ref.is_null (table.get $t (local.get $at)))) (then unreachable))
            (table.set $t (local.get $at) (ref.func $f))
            (local.set $at (i32.add (local.get $at) (i32.const 1)))
            (br $next))))
        (func (export "handle") (param i32 i32) (local $end i32)
          (if (i64.ne (global.get $g) (i64.const 1234567)) (then unreachable))
          (global.set $g (i64.const -1))
          (call $tables (i32.const 1))
          (call $data (i32.const 4096))
          (call $clean (i32.const 0) (i32.const 4096))
          (call $clean (i32.const {data_next}) (i32.mul (memory.size) (i32.const 65536)))
          (local.set $end (i32.mul (memory.size) (i32.const 65536)))
          (block $full (loop $more
            (br_if $full (i32.eq (memory.grow (i32.const 7)) (i32.const -1))) (br $more)))
          (call $clean (local.get $end) (i32.mul (memory.size) (i32.const 65536)))
          (drop (table.grow $t (ref.null func) (i32.const 300)))
          (call $fill (i32.const 0) (i32.mul (memory.size) (i32.const 65536))))"#,
        data_end = 4096 + data,
        data_next = (4096 + data).next_multiple_of(8),
    ))
}

async fn rounds(wipe: Wipe) {
    let fixture = WasmHostFixture::with(Config { wipe, instances_max: Some(6), ..Config::default() });
    // Small and large, with and without initial data; limits below and above the number of bytes that slots keep.
    let mut functions: Vec<Arc<dyn HostedFunction>> = Vec::new();
    for (index, (pages, data, limit)) in
        [(1u32, 0usize, 1u64 << 20), (20, 9000, 2 << 20), (3, 200_000, 5 << 20), (17, 3, 24 << 20)]
            .into_iter()
            .enumerate()
    {
        let pages = pages.max(u32::try_from((4096 + data).div_ceil(65536)).unwrap());
        let component = fixture.upload(filler(pages, data)).await;
        for copy in 0..2u64 {
            let mut spec = spec(&format!("f{index}-{copy}"), component);
            spec.memory_bytes_max = limit + (copy << 20);
            functions.push(fixture.host.prepare(spec));
        }
    }
    let tasks: Vec<_> = (0..8)
        .map(|task| {
            let functions = functions.clone();
            tokio::spawn(async move {
                for round in 0..40 {
                    let function = &functions[(task * 3 + round * 5) % functions.len()];
                    let error = call(function, get("/")).await.err().unwrap();
                    assert_eq!(error, CallError::NoAnswer, "task {task}, round {round}");
                }
            })
        })
        .collect();
    for task in tasks {
        task.await.unwrap();
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn nothing_is_left_for_the_next_instance() {
    rounds(Wipe::Auto).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn nothing_is_left_for_the_next_instance_without_the_kernels_help() {
    rounds(Wipe::Plain).await;
}

/// Verifies that the filler detects changes: two rounds in one instance.
#[tokio::test(flavor = "multi_thread")]
async fn the_filler_traps_if_memory_was_not_wiped() {
    let fixture = WasmHostFixture::new();
    let function = fixture
        .function(filler(3, 9000), |spec| spec.isolation = mayfly_api::function::Isolation::Reuse)
        .await;
    assert_eq!(call(&function, get("/")).await.err().unwrap(), CallError::NoAnswer);
    assert!(matches!(call(&function, get("/")).await.err().unwrap(), CallError::Trapped(_)));
}

/// The same with a component built by a real toolchain.
#[tokio::test(flavor = "multi_thread")]
async fn the_dirty_example_finds_nothing() {
    let dirty = guest!("dirty");
    let fixture = WasmHostFixture::with(Config { instances_max: Some(2), ..Config::default() });
    let component = fixture.upload(dirty).await;
    let one = fixture.host.prepare(spec("one", component));
    let other = fixture.host.prepare(spec("other", component));
    for _ in 0..5 {
        for (fills, probes) in [(&one, &other), (&other, &one), (&one, &one)] {
            let (_, filled) = ask(fills, "/fill").await;
            assert!(filled.starts_with("{\"filledBytes\":") && !filled.contains(":0}"), "{filled}");
            let (_, probed) = ask(probes, "/probe").await;
            assert!(probed.ends_with("\"hits\":0}\n"), "{probed}");
        }
    }
}
