//! Tests that the rewritten module does the same as the original.

use wasmtime::{Engine, Instance, Memory, Module, Store, TypedFunc};

use super::*;

const MIB: u32 = 1 << 20;
/// The size of each memory.
const MEMORY_BYTES: u32 = 4 * MIB;

/// A function for each instruction, over two memories of which one may have 64-bit addresses.
fn text(second: &str) -> String {
    let wide = if second == "i64" { "i64" } else { "i32" };
    format!(
        r#"(module
            (type $recursive (func))
            (memory $a (export "a") 64 64)
            (memory $b (export "b") {second} 64 64)
            (data $text "some text that is copied")
            (func (export "fill") (param i32 i32 i32)
              local.get 0 local.get 1 local.get 2 memory.fill $a)
            (func (export "fill_b") (param {wide} i32 {wide})
              local.get 0 local.get 1 local.get 2 memory.fill $b)
            (func (export "copy") (param i32 i32 i32)
              local.get 0 local.get 1 local.get 2 memory.copy $a $a)
            (func (export "copy_b") (param i32 {wide} i32)
              local.get 0 local.get 1 local.get 2 memory.copy $a $b)
            (func (export "init") (param i32 i32 i32)
              local.get 0 local.get 1 local.get 2 memory.init $a $text)
            (func (export "constants")
              i32.const 8 i32.const 7 i32.const 16 memory.fill $a
              i32.const 64 i32.const 9 i32.const 1000000 memory.fill $a))"#
    )
}

struct Tried {
    store: Store<()>,
    instance: Instance,
}

impl Tried {
    fn new(module: &[u8]) -> Self {
        let engine = Engine::default();
        let module = Module::new(&engine, module).unwrap();
        let mut store = Store::new(&engine, ());
        let instance = Instance::new(&mut store, &module, &[]).unwrap();
        Self { store, instance }
    }

    fn memory(&mut self, name: &str) -> Memory {
        self.instance.get_memory(&mut self.store, name).unwrap()
    }

    /// Calls a function; returns whether it trapped, and the content of memory `a`.
    fn call(&mut self, name: &str, arguments: (u32, u32, u32)) -> (bool, Vec<u8>) {
        let function: TypedFunc<(u32, u32, u32), ()> =
            self.instance.get_typed_func(&mut self.store, name).unwrap();
        let trapped = function.call(&mut self.store, arguments).is_err();
        let memory = self.memory("a");
        (trapped, memory.data(&self.store).to_vec())
    }
}

/// The rewritten module and the original.
fn both(text: &str) -> [Tried; 2] {
    let original = wat::parse_str(text).unwrap();
    let rewritten = module(&original).unwrap();
    assert_ne!(original, rewritten);
    [original, rewritten].map(|module| Tried::new(&module))
}

/// Fills memory so that neighbouring bytes differ.
fn pattern(memory: &mut [u8]) {
    for (at, byte) in memory.iter_mut().enumerate() {
        *byte = at.wrapping_mul(2_654_435_761).to_le_bytes()[2];
    }
}

#[test]
fn every_instruction_does_what_it_did() {
    let piece = PIECE_BYTES;
    let [mut original, mut rewritten] = both(&text("i32"));
    for tried in [&mut original, &mut rewritten] {
        for name in ["a", "b"] {
            let memory = tried.memory(name);
            pattern(memory.data_mut(&mut tried.store));
        }
    }
    for (name, arguments) in [
        ("fill", (10, 0x1ff, piece - 1)),
        ("fill", (11, 3, piece)),
        ("fill", (12, 4, piece + 1)),
        ("fill", (1, 5, 3 * piece)),
        ("fill", (0, 6, MEMORY_BYTES)),
        ("fill", (MEMORY_BYTES, 6, 0)),
        ("copy_b", (100, 7, 5 * piece + 3)),
        // Overlapping ranges in both directions, and identical ranges.
        ("copy", (100, 200, 5 * piece + 3)),
        ("copy", (200, 100, 5 * piece + 3)),
        ("copy", (100, 100, 3 * piece)),
        ("copy", (piece, 0, 4 * piece)),
        ("copy", (0, piece / 2, 4 * piece)),
        ("init", (5, 2, 10)),
    ] {
        let (expected, found) = (original.call(name, arguments), rewritten.call(name, arguments));
        assert!(!expected.0 && expected == found, "{name} {arguments:?}");
    }
}

#[test]
fn out_of_bounds_operations_trap_before_writing() {
    let [mut original, mut rewritten] = both(&text("i32"));
    for (name, arguments) in [
        ("fill", (MEMORY_BYTES - 10, 1, 11)),
        ("fill", (MIB, 1, MEMORY_BYTES)),
        ("fill", (1, 1, u32::MAX)),
        ("fill", (MEMORY_BYTES + 1, 1, 0)),
        ("copy", (0, MIB, MEMORY_BYTES)),
        ("copy", (MIB, 0, MEMORY_BYTES)),
        ("copy_b", (0, MIB, MEMORY_BYTES)),
        ("init", (0, 0, 100)),
        ("init", (0, 0, 2 * PIECE_BYTES)),
    ] {
        let (expected, found) = (original.call(name, arguments), rewritten.call(name, arguments));
        assert!(expected.0 && expected == found, "{name} {arguments:?}");
    }
}

#[test]
fn memories_with_64_bit_addresses_are_filled_in_pieces_too() {
    let [mut original, mut rewritten] = both(&text("i64"));
    for tried in [&mut original, &mut rewritten] {
        let fill: TypedFunc<(u64, u32, u64), ()> =
            tried.instance.get_typed_func(&mut tried.store, "fill_b").unwrap();
        fill.call(&mut tried.store, (5, 9, 3 * u64::from(PIECE_BYTES))).unwrap();
        assert!(fill.call(&mut tried.store, (5, 9, u64::MAX)).is_err());
        let copy: TypedFunc<(u32, u64, u32), ()> =
            tried.instance.get_typed_func(&mut tried.store, "copy_b").unwrap();
        copy.call(&mut tried.store, (1, 3, 2 * MIB)).unwrap();
    }
    let [expected, found] = [original, rewritten].map(|mut tried| {
        let memory = tried.memory("a");
        memory.data(&tried.store).to_vec()
    });
    assert!(expected == found && expected[PIECE_BYTES as usize] == 9);
}

#[test]
fn short_constant_lengths_stay_as_they_are() {
    let with = |length: u32| {
        let text =
            format!("(module (memory 64) (func i32.const 0 i32.const 0 i32.const {length} memory.fill))");
        let original = wat::parse_str(text).unwrap();
        module(&original).unwrap() == original
    };
    assert!(with(PIECE_BYTES) && !with(PIECE_BYTES + 1) && !with(u32::MAX));
    // A module without such an instruction gets no helpers.
    let plain = wat::parse_str("(module (memory 1) (func (export \"f\")))").unwrap();
    assert_eq!(module(&plain).unwrap(), plain);
}

#[test]
fn modules_inside_of_components_are_rewritten_and_nothing_else() {
    let text = r#"(component
        (component $inner
          (core module $m (memory 1)
            (func (export "f") (param i32) i32.const 0 i32.const 0 local.get 0 memory.fill))
          (core instance $i (instantiate $m))
          (func (export "f") (param "n" u32) (canon lift (core func $i "f"))))
        (instance $i (instantiate $inner))
        (export "f" (func $i "f")))"#;
    let original = wat::parse_str(text).unwrap();
    let rewritten = split_bulk_ops(&original).unwrap();
    assert!(rewritten.len() > original.len());
    wasmparser::Validator::new().validate_all(&rewritten).unwrap();
    assert!(split_bulk_ops(b"\0asm").is_err() && split_bulk_ops(b"").is_err());
}
