//! Components on disk and in memory.

use crate::support::{text::handler, *};
use mayfly_runtime::{CallError, FunctionHost as _};
use mayfly_runtime_wasm::Config;

const ANSWERS: &str = r#"(func (export "handle") (param i32 i32) (call $answer (local.get 1)))"#;

fn loaded(fixture: &WasmHostFixture) -> f64 {
    metric(&fixture.metrics(), "mayfly_wasm_components_loaded ")
}

fn compiles(fixture: &WasmHostFixture) -> f64 {
    metric(&fixture.metrics(), "mayfly_wasm_compile_seconds_count")
}

#[tokio::test(flavor = "multi_thread")]
async fn concurrent_callers_share_one_compilation() {
    let fixture = WasmHostFixture::new();
    let component = fixture.upload(handler(ANSWERS)).await;
    fixture.host.precompile(&component, "default").await.unwrap();
    fixture.host.precompile(&component, "default").await.unwrap();
    let functions: Vec<_> =
        (0..20).map(|n| fixture.host.prepare(spec(&format!("f{n}"), component))).collect();
    let asked: Vec<_> = functions
        .iter()
        .map(|function| {
            let function = function.clone();
            tokio::spawn(async move { ask(&function, "/").await.0 })
        })
        .collect();
    for one in asked {
        assert_eq!(one.await.unwrap(), 200);
    }
    assert_eq!(compiles(&fixture), 1.0);
    assert_eq!(loaded(&fixture), 1.0, "they share it");
    // Another process finds the compiled file on disk.
    let WasmHostFixture { folder, host, .. } = fixture;
    drop((functions, host));
    let fixture = WasmHostFixture::over(folder, small());
    ask(&fixture.host.prepare(spec("f", component)), "/").await;
    assert_eq!(compiles(&fixture), 0.0);
}

#[tokio::test(flavor = "multi_thread")]
async fn compilation_continues_after_its_caller_leaves() {
    let fixture = WasmHostFixture::new();
    let component = fixture.upload(handler(ANSWERS)).await;
    let function = fixture.host.prepare(spec("f", component));
    let mut loading = function.load();
    assert!(futures::poll!(&mut loading).is_pending());
    drop(loading);
    eventually("it is compiled", || compiles(&fixture) == 1.0).await;
    ask(&function, "/").await;
    assert_eq!(compiles(&fixture), 1.0);
}

#[tokio::test(flavor = "multi_thread")]
async fn damaged_and_foreign_files_are_compiled_again() {
    let fixture = WasmHostFixture::new();
    let component = fixture.upload(handler(ANSWERS)).await;
    let function = fixture.host.prepare(spec("f", component));
    ask(&function, "/").await;
    let path = compiled(fixture.folder.path());
    let whole = std::fs::read(&path).unwrap();
    let mut flipped = whole.clone();
    flipped[whole.len() / 2] ^= 1;
    let cases = [Vec::new(), whole[..whole.len() / 2].to_vec(), flipped, b"\x7fELF, but not ours".to_vec()];
    for (count, damaged) in cases.into_iter().enumerate() {
        function.unload();
        // The component stays until the guest also releases it.
        eventually("it is not in memory", || loaded(&fixture) == 0.0).await;
        // A new file, like a restored backup: a mapped file is never written to.
        let aside = path.with_extension("new");
        std::fs::write(&aside, damaged).unwrap();
        std::fs::rename(&aside, &path).unwrap();
        ask(&function, "/").await;
        assert_eq!(compiles(&fixture), 2.0 + count as f64);
        assert_eq!(std::fs::read(&path).unwrap().len(), whole.len());
    }
}

/// Large files are checked and mapped on another thread, with the same results.
#[tokio::test(flavor = "multi_thread")]
async fn large_components_are_mapped_and_damage_is_seen() {
    let fixture = WasmHostFixture::new();
    let large = format!("{ANSWERS} (memory 100) (data (i32.const 0) \"{}\")", "large".repeat(1 << 20));
    let component = fixture.upload(handler(&large)).await;
    let function = fixture.host.prepare(spec("f", component));
    ask(&function, "/").await;
    let WasmHostFixture { folder, host, .. } = fixture;
    drop((function, host));
    let fixture = WasmHostFixture::over(folder, small());
    let function = fixture.host.prepare(spec("f", component));
    ask(&function, "/").await;
    assert_eq!(compiles(&fixture), 0.0);
    function.unload();
    eventually("it is not in memory", || loaded(&fixture) == 0.0).await;
    let path = compiled(fixture.folder.path());
    let mut content = std::fs::read(&path).unwrap();
    assert!(content.len() > 5 << 20, "{}", content.len());
    content[4 << 20] ^= 1;
    std::fs::remove_file(&path).unwrap();
    std::fs::write(&path, content).unwrap();
    ask(&function, "/").await;
    assert_eq!(compiles(&fixture), 1.0);
}

/// Recompilation may not succeed at once; the damage is still logged only once.
#[tokio::test(flavor = "multi_thread")]
async fn a_damaged_file_is_logged_only_once() {
    let fixture = WasmHostFixture::new();
    let component = fixture.upload(handler(ANSWERS)).await;
    let function = fixture.host.prepare(spec("f", component));
    ask(&function, "/").await;
    function.unload();
    let path = compiled(fixture.folder.path());
    std::fs::remove_file(&path).unwrap();
    std::fs::write(&path, "damaged").unwrap();
    let source = fixture.artifacts.path(&component).unwrap();
    let content = std::fs::read(&source).unwrap();
    std::fs::remove_file(&source).unwrap();
    assert_eq!(call(&function, get("/")).await.err(), Some(CallError::ComponentMissing(component)));
    assert!(!path.exists(), "whoever asks next does not meet it");
    std::fs::write(&source, content).unwrap();
    assert_eq!(ask(&function, "/").await.0, 200);
}

#[tokio::test(flavor = "multi_thread")]
async fn the_longest_unused_component_goes_first() {
    let fixture = WasmHostFixture::with(Config { loaded_bytes_max: 1, ..small() });
    let mut functions = Vec::new();
    for name in ["a", "b", "c"] {
        let text = format!("{ANSWERS} (func ${name})");
        let component = fixture.upload(handler(&text)).await;
        functions.push(fixture.host.prepare(spec(name, component)));
    }
    // Only loaded, not called: a guest may hold its component briefly after its answer.
    for function in &functions {
        function.load().await.unwrap();
    }
    let loaded: Vec<bool> = functions.iter().map(|function| function.is_loaded()).collect();
    assert_eq!(loaded, [false, false, true]);
    ask(&functions[0], "/").await;
}

#[tokio::test(flavor = "multi_thread")]
async fn handles_follow_their_specs() {
    let fixture = WasmHostFixture::new();
    let component = fixture.upload(handler(ANSWERS)).await;
    let one = fixture.host.prepare(spec("f", component));
    ask(&one, "/").await;
    assert!(std::ptr::addr_eq(&*one, &*fixture.host.prepare(spec("f", component))), "the same spec");
    let mut changed = spec("f", component);
    changed.env.push(("KEY".into(), "new".into()));
    let two = fixture.host.prepare(changed.clone());
    assert!(!std::ptr::addr_eq(&*one, &*two));
    assert!(two.is_loaded() && !one.is_loaded(), "what is in memory stays there");
    fixture.host.forget(&changed.revision);
    assert!(!two.is_loaded());
    eventually("it is not in memory", || loaded(&fixture) == 0.0).await;
    // The component was garbage-collected meanwhile.
    fixture.artifacts.remove(&component).await.unwrap();
    let gone = call(&two, get("/")).await.err().unwrap();
    assert_eq!(gone, CallError::ComponentMissing(component));
}

#[tokio::test(flavor = "multi_thread")]
async fn metrics_of_a_function_are_removed_with_its_last_revision() {
    let fixture = WasmHostFixture::new();
    let component = fixture.upload(handler(ANSWERS)).await;
    let mut next = spec("f", component);
    next.revision.name = "f-00002".into();
    let revisions =
        [spec("f", component), next].map(|spec| (fixture.host.prepare(spec.clone()), spec.revision));
    for (function, _) in &revisions {
        ask(function, "/").await;
    }
    fixture.settled().await;
    let calls = r#"mayfly_wasm_calls_total{namespace="default",function="f",outcome="Answered"}"#;
    assert_eq!(metric(&fixture.metrics(), calls), 2.0);
    let [(first, of_first), (second, of_second)] = revisions;
    fixture.host.forget(&of_first);
    drop(first);
    assert_eq!(metric(&fixture.metrics(), calls), 2.0, "the other revision counts on");
    fixture.host.forget(&of_second);
    drop(second);
    eventually("they are forgotten", || !fixture.metrics().contains("function=\"f\"")).await;
    ask(&fixture.host.prepare(spec("f", component)), "/").await;
    assert_eq!(metric(&fixture.metrics(), calls), 1.0);
}
