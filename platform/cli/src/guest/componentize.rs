//! Converts a core module to a component.

use anyhow::{Context, Result, bail};
use wasi_preview1_component_adapter_provider::{
    WASI_SNAPSHOT_PREVIEW1_ADAPTER_NAME, WASI_SNAPSHOT_PREVIEW1_COMMAND_ADAPTER,
    WASI_SNAPSHOT_PREVIEW1_REACTOR_ADAPTER,
};
use wasmparser::{Parser, Payload};
use wit_component::ComponentEncoder;

use super::exit_codes::with_exit_codes;

/// The type of the module, which determines its entry points.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ModuleShape {
    /// A library with exported functions.
    Library,
    /// A program with a `main`: a job.
    Program,
}

/// The preamble of a core module and of a component: magic, version, layer.
const MODULE: [u8; 8] = *b"\0asm\x01\0\0\0";
const COMPONENT: [u8; 8] = *b"\0asm\x0d\0\x01\0";

/// Converts a module to a component. A component (from `wasm32-wasip2`) is returned unchanged.
pub(super) fn componentize(wasm: Vec<u8>, shape: ModuleShape) -> Result<Vec<u8>> {
    if wasm.starts_with(&COMPONENT) {
        return Ok(wasm);
    }
    if !wasm.starts_with(&MODULE) {
        bail!("the compiler's output is not WebAssembly");
    }
    let adapter = match shape {
        ModuleShape::Library => WASI_SNAPSHOT_PREVIEW1_REACTOR_ADAPTER,
        ModuleShape::Program => WASI_SNAPSHOT_PREVIEW1_COMMAND_ADAPTER,
    };
    let wasm = match shape {
        ModuleShape::Library => wasm,
        ModuleShape::Program => with_exit_codes(wasm).context("cannot read the module")?,
    };
    ComponentEncoder::default()
        .validate(true)
        .module(&wasm)
        .context("cannot read the module's interface metadata")?
        // The adapter and the program may refer to different patch versions of WASI, which are merged into one import.
        .merge_imports_based_on_semver(true)
        .adapter(WASI_SNAPSHOT_PREVIEW1_ADAPTER_NAME, adapter)
        .and_then(|mut encoder| encoder.encode())
        .context("cannot make a component of the module")
}

/// Converts a core module, as produced by the tool chains of most languages, to a component; other content is returned
/// unchanged. A module with a `_start` becomes a program, others become a library with the interfaces in their
/// metadata.
///
/// # Errors
/// The reason why the module cannot be a component, for example an import that no adapter provides.
pub(crate) fn component_of(content: Vec<u8>) -> Result<Vec<u8>> {
    if !content.starts_with(&MODULE) {
        return Ok(content);
    }
    let shape = if has_start(&content)? { ModuleShape::Program } else { ModuleShape::Library };
    componentize(content, shape)
}

fn has_start(module: &[u8]) -> Result<bool> {
    for payload in Parser::new(0).parse_all(module) {
        if let Payload::ExportSection(exports) = payload.context("cannot read the module")? {
            for export in exports {
                if export.context("cannot read the module's exports")?.name == "_start" {
                    return Ok(true);
                }
            }
        }
    }
    Ok(false)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_module_with_a_start_becomes_a_program() {
        // (module (func) (memory 1) (export "_start" (func 0)) (export "memory" (memory 0)))
        let mut module = MODULE.to_vec();
        module.extend([1, 4, 1, 0x60, 0, 0, 3, 2, 1, 0, 5, 3, 1, 0, 1, 7, 19, 2, 6]);
        module.extend(b"_start\0\0\x06memory\x02\0");
        module.extend([10, 4, 1, 2, 0, 0x0b]);
        assert!(has_start(&module).unwrap());
        let component = component_of(module).unwrap();
        let report = mayfly_runtime::component::inspect(&component).unwrap();
        assert_eq!(report.worlds.iter().map(ToString::to_string).collect::<Vec<_>>(), ["wasi:cli/run@0.2"]);
        // Components and other content are unchanged.
        assert_eq!(component_of(component.clone()).unwrap(), component);
        assert_eq!(component_of(b"text".to_vec()).unwrap(), b"text");
        assert!(component_of([&MODULE[..], &[7, 100]].concat()).is_err());
    }

    #[test]
    fn a_module_becomes_a_component_and_stays_one() {
        let component = componentize(MODULE.to_vec(), ModuleShape::Library).unwrap();
        assert!(component.starts_with(&COMPONENT));
        assert_eq!(componentize(component.clone(), ModuleShape::Program).unwrap(), component);
    }

    #[test]
    fn anything_else_is_refused() {
        for bytes in [b"".as_slice(), b"#!/bin/sh", b"\0asm\x02\0\0\0"] {
            let error = componentize(bytes.to_vec(), ModuleShape::Library).unwrap_err();
            assert_eq!(error.to_string(), "the compiler's output is not WebAssembly");
        }
    }

    #[test]
    fn an_import_nobody_provides_is_named() {
        // (module (import "wasi_snapshot_preview1" "no_such_call" (func)))
        let mut module = MODULE.to_vec();
        module.extend([1, 4, 1, 0x60, 0, 0]);
        let (space, name) = (b"wasi_snapshot_preview1", b"no_such_call");
        let mut import = vec![1];
        for text in [space.as_slice(), name] {
            import.push(u8::try_from(text.len()).unwrap());
            import.extend(text);
        }
        import.extend([0, 0]);
        module.extend([2, u8::try_from(import.len()).unwrap()]);
        module.extend(import);
        let error = componentize(module, ModuleShape::Library).unwrap_err();
        assert!(format!("{error:#}").contains("no_such_call"), "{error:#}");
    }
}
