use mayfly_runtime::component::known;

use super::*;
use crate::engine::AsyncModel;

/// Links a component that imports every interface of the table as an empty instance: the linker rejects unknown ones.
#[test]
fn every_known_interface_is_linked() {
    for (table, version, model) in [
        (known::INTERFACES_2, known::VERSION_2, AsyncModel::Sync),
        (known::INTERFACES_2, known::VERSION_2, AsyncModel::Async),
        (known::INTERFACES_3, known::VERSION_3, AsyncModel::Async),
    ] {
        let mut config = wasmtime::Config::new();
        config.wasm_component_model_async(model == AsyncModel::Async);
        config.concurrency_support(model == AsyncModel::Async);
        let engine = wasmtime::Engine::new(&config).unwrap();
        let linker = linker(&engine, model).unwrap();
        let names = table.iter().flat_map(|(package, interfaces)| {
            interfaces.iter().map(move |interface| format!("{package}/{interface}@{version}"))
        });
        for name in names.chain(known::DRAFTS.iter().map(|draft| (*draft).to_owned())) {
            // This imports a function that cannot exist: the error says whether the linker knows the instance.
            let text = format!(r#"(component (import "{name}" (instance (export "no-such" (func)))))"#);
            let component = wasmtime::component::Component::new(&engine, text).unwrap();
            let error = linker.instantiate_pre(&component).err().unwrap();
            let error = format!("{error:#}");
            assert!(error.contains("no-such"), "{name} is in the table, but not in the linker: {error}");
            assert_eq!(known::missing(&name), None);
        }
    }
}
