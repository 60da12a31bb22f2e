//! Exit codes of programs. `proc_exit` of preview 1 takes an exit code, but the adapter to preview 2 only passes on
//! whether it is 0. Since 0.2.12 preview 2 has a call that takes the code, so the module is changed to use that.

use anyhow::{Context, Result};
use wasm_encoder::{
    ImportSection, Module, RawSection,
    reencode::{Reencode as _, RoundtripReencoder},
};
use wasmparser::{Parser, Payload};
use wit_component::{StringEncoding, embed_component_metadata};
use wit_parser::Resolve;

/// Preview 1's exit call, which the adapter maps to success or failure.
const PREVIEW_1: (&str, &str) = ("wasi_snapshot_preview1", "proc_exit");
/// Preview 2's exit call with an exit code. Both calls take one number and do not return.
const PREVIEW_2: (&str, &str) = ("wasi:cli/exit@0.2.12", "exit-with-code");
const WIT: &str = "package mayfly:program;

world program {
    import wasi:cli/exit@0.2.12;
}

package wasi:cli@0.2.12 {
    interface exit {
        exit: func(status: result);
        exit-with-code: func(status-code: u8);
    }
}
";

/// Makes a program exit with its own code; a module that never exits is unchanged.
pub(super) fn with_exit_codes(module: Vec<u8>) -> Result<Vec<u8>> {
    let mut found = false;
    let mut changed = Module::new();
    for payload in Parser::new(0).parse_all(&module) {
        let payload = payload?;
        if let Payload::ImportSection(imports) = payload {
            let mut section = ImportSection::new();
            for import in imports.into_imports() {
                let import = import?;
                let ty = RoundtripReencoder.entity_type(import.ty)?;
                let exits = (import.module, import.name) == PREVIEW_1;
                found |= exits;
                let (space, name) = if exits { PREVIEW_2 } else { (import.module, import.name) };
                section.import(space, name, ty);
            }
            changed.section(&section);
        } else if let Some((id, range)) = payload.as_section() {
            changed.section(&RawSection { id, data: &module[range] });
        }
    }
    if !found {
        return Ok(module);
    }
    let mut module = changed.finish();
    let mut wit = Resolve::default();
    let package = wit.push_str("program.wit", WIT)?;
    let world = wit.select_world(&[package], None)?;
    embed_component_metadata(&mut module, &wit, world, StringEncoding::UTF8)
        .context("cannot replace proc_exit")?;
    Ok(module)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A module with one imported function that takes a number.
    fn importing(space: &str, name: &str) -> Vec<u8> {
        let mut module = Module::new();
        let mut types = wasm_encoder::TypeSection::new();
        types.ty().function([wasm_encoder::ValType::I32], []);
        module.section(&types);
        let mut imports = ImportSection::new();
        imports.import(space, name, wasm_encoder::EntityType::Function(0));
        module.section(&imports);
        module.finish()
    }

    #[test]
    fn only_the_exit_is_changed() {
        let other = importing("wasi_snapshot_preview1", "fd_close");
        assert_eq!(with_exit_codes(other.clone()).unwrap(), other);
        let changed = with_exit_codes(importing(PREVIEW_1.0, PREVIEW_1.1)).unwrap();
        assert!(changed.starts_with(&importing(PREVIEW_2.0, PREVIEW_2.1)));
        assert!(with_exit_codes(b"no module".to_vec()).is_err());
    }
}
