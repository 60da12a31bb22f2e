//! A process without free file descriptors. In a file of its own, because the limit applies to the whole process.

mod support;

use std::os::unix::fs::MetadataExt as _;

use mayfly_runtime::{CallError, FunctionHost as _};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use support::{text::handler, *};

const ANSWERS: &str = r#"(func (export "handle") (param i32 i32) (call $answer (local.get 1)))"#;

#[tokio::test(flavor = "multi_thread")]
async fn a_good_compiled_file_outlives_a_shortage_of_descriptors() {
    let fixture = WasmHostFixture::new();
    let component = fixture.upload(handler(ANSWERS)).await;
    let function = fixture.host.prepare(spec("f", component));
    ask(&function, "/").await;
    function.unload();
    let loaded = || metric(&fixture.metrics(), "mayfly_wasm_components_loaded ");
    eventually("it is not in memory", || loaded() == 0.0).await;
    let path = compiled(fixture.folder.path());
    let before = std::fs::metadata(&path).unwrap().ino();

    let limit = getrlimit(Resource::Nofile);
    setrlimit(Resource::Nofile, Rlimit { current: Some(0), ..limit }).unwrap();
    let refused = call(&function, get("/")).await.err();
    setrlimit(Resource::Nofile, limit).unwrap();
    assert!(matches!(refused, Some(CallError::Overloaded { .. })), "{refused:?}");

    assert_eq!(ask(&function, "/").await.0, 200);
    assert_eq!(std::fs::metadata(&path).unwrap().ino(), before, "it is the same file");
    assert_eq!(metric(&fixture.metrics(), "mayfly_wasm_compile_seconds_count"), 1.0);
}
