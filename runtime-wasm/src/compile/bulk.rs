//! Makes bulk memory instructions interruptible before a component is compiled.
//!
//! Guests are interrupted in loops and at function entries. `memory.fill`, `memory.copy` and `memory.init` are single
//! instructions that may process a whole memory, and wasmtime checks the epoch only before them. Each of them whose
//! length is not a small constant becomes a call of a helper function in the same module, which does the same in a loop
//! over pieces of [`PIECE_BYTES`].
//!
//! The rest of the component stays byte for byte the same: the helpers are appended after the module's own functions
//! and types, so that no index changes. Table instructions need no splitting, because tables are small
//! (`mayfly_runtime::component::TABLE_ELEMENTS_MAX`).

use wasm_encoder::{BlockType, Function, Instruction, ValType};
use wasmparser::{
    BinaryReader, BinaryReaderError, CodeSectionReader, FunctionSectionReader, ImportSectionReader,
    MemorySectionReader, MemoryType, Operator, TypeRef, TypeSectionReader,
};

/// The maximum number of bytes of one instruction: about 10 µs, or 100 µs when its pages are touched for the first
/// time.
const PIECE_BYTES: u32 = 256 << 10;

/// Magic number and version.
const HEADER_BYTES: usize = 8;
const SECTION_CUSTOM: u8 = 0;
const SECTION_TYPE: u8 = 1;
const SECTION_IMPORT: u8 = 2;
const SECTION_FUNCTION: u8 = 3;
const SECTION_MEMORY: u8 = 5;
const SECTION_CODE: u8 = 10;
const COMPONENT_SECTION_MODULE: u8 = 1;
const COMPONENT_SECTION_COMPONENT: u8 = 4;
/// Hints for compilers, keyed by code offset, which the rewriting invalidates.
const CODE_METADATA_PREFIX: &str = "metadata.code.";

type Result<T> = std::result::Result<T, BinaryReaderError>;

/// The component with bulk memory instructions in pieces.
pub(super) fn split_bulk_ops(component: &[u8]) -> Result<Vec<u8>> {
    let mut rewritten = component[..component.len().min(HEADER_BYTES)].to_vec();
    for section in sections(component)? {
        match section.id {
            COMPONENT_SECTION_MODULE => put_section(&mut rewritten, section.id, &module(section.content)?),
            COMPONENT_SECTION_COMPONENT => {
                put_section(&mut rewritten, section.id, &split_bulk_ops(section.content)?);
            }
            id => put_section(&mut rewritten, id, section.content),
        }
    }
    Ok(rewritten)
}

struct Section<'a> {
    id: u8,
    content: &'a [u8],
}

/// The sections of a module or a component, which have the same format.
fn sections(content: &[u8]) -> Result<Vec<Section<'_>>> {
    let mut reader = BinaryReader::new(content, 0);
    reader.read_bytes(HEADER_BYTES)?;
    let mut sections = Vec::new();
    while !reader.eof() {
        let id = reader.read_u8()?;
        let size = reader.read_var_u32()? as usize;
        sections.push(Section { id, content: reader.read_bytes(size)? });
    }
    Ok(sections)
}

fn put_section(to: &mut Vec<u8>, id: u8, content: &[u8]) {
    to.push(id);
    put_number(to, content.len());
    to.extend_from_slice(content);
}

/// Appends an unsigned number in LEB128. All sizes derive from a file in memory, so they fit into the 32 bits that the
/// format has.
fn put_number(to: &mut Vec<u8>, number: usize) {
    let mut rest = number;
    while rest >= 0x80 {
        to.push(rest.to_le_bytes()[0] | 0x80);
        rest >>= 7;
    }
    to.push(rest.to_le_bytes()[0]);
}

/// A bulk instruction, with its immediate operands.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum BulkOp {
    Fill { memory: u32 },
    Copy { to: u32, from: u32 },
    Init { segment: u32, memory: u32 },
}

impl BulkOp {
    fn of(operator: &Operator<'_>) -> Option<Self> {
        match *operator {
            Operator::MemoryFill { mem } => Some(Self::Fill { memory: mem }),
            Operator::MemoryCopy { dst_mem, src_mem } => Some(Self::Copy { to: dst_mem, from: src_mem }),
            Operator::MemoryInit { data_index, mem } => Some(Self::Init { segment: data_index, memory: mem }),
            _ => None,
        }
    }

    fn instruction(self) -> Instruction<'static> {
        match self {
            Self::Fill { memory } => Instruction::MemoryFill(memory),
            Self::Copy { to, from } => Instruction::MemoryCopy { src_mem: from, dst_mem: to },
            Self::Init { segment, memory } => Instruction::MemoryInit { mem: memory, data_index: segment },
        }
    }
}

/// The counts and types of a module that its helper functions depend on.
#[derive(Default)]
struct Indices {
    types: u32,
    functions: u32,
    memories: Vec<MemoryType>,
}

impl Indices {
    fn of(sections: &[Section<'_>]) -> Result<Self> {
        let mut indices = Self::default();
        for section in sections {
            let reader = BinaryReader::new(section.content, 0);
            match section.id {
                SECTION_TYPE => {
                    for group in TypeSectionReader::new(reader)? {
                        indices.types += u32::try_from(group?.types().len()).unwrap_or(u32::MAX);
                    }
                }
                SECTION_IMPORT => {
                    for import in ImportSectionReader::new(reader)?.into_imports() {
                        match import?.ty {
                            TypeRef::Func(_) | TypeRef::FuncExact(_) => indices.functions += 1,
                            TypeRef::Memory(memory) => indices.memories.push(memory),
                            TypeRef::Table(_) | TypeRef::Global(_) | TypeRef::Tag(_) => {}
                        }
                    }
                }
                SECTION_FUNCTION => indices.functions += FunctionSectionReader::new(reader)?.count(),
                SECTION_MEMORY => {
                    for memory in MemorySectionReader::new(reader)? {
                        indices.memories.push(memory?);
                    }
                }
                _ => {}
            }
        }
        Ok(indices)
    }
}

fn module(content: &[u8]) -> Result<Vec<u8>> {
    let sections = sections(content)?;
    let indices = Indices::of(&sections)?;
    let mut helpers = Helpers { first: indices.functions, ops: Vec::new() };
    let mut bodies = None;
    if let Some(code) = sections.iter().find(|section| section.id == SECTION_CODE) {
        bodies = Some(helpers.rewrite(code.content)?);
    }
    let (Some(bodies), false) = (bodies, helpers.ops.is_empty()) else { return Ok(content.to_vec()) };
    let made: Vec<Helper> = helpers.ops.iter().map(|op| Helper::new(*op, &indices)).collect();
    let mut rewritten = content[..HEADER_BYTES].to_vec();
    for section in &sections {
        match section.id {
            SECTION_TYPE => {
                let types = made.iter().map(|helper| helper.type_bytes());
                put_section(&mut rewritten, section.id, &appended(section.content, types)?);
            }
            SECTION_FUNCTION => {
                let types = (0..made.len()).map(|at| number_bytes(indices.types as usize + at));
                put_section(&mut rewritten, section.id, &appended(section.content, types)?);
            }
            SECTION_CODE => {
                let bodies = bodies.iter().cloned().chain(made.iter().map(Helper::body));
                put_section(&mut rewritten, section.id, &code_section(bodies));
            }
            SECTION_CUSTOM if is_code_metadata(section.content) => {}
            id => put_section(&mut rewritten, id, section.content),
        }
    }
    Ok(rewritten)
}

fn is_code_metadata(content: &[u8]) -> bool {
    let name = BinaryReader::new(content, 0).read_string();
    name.is_ok_and(|name| name.starts_with(CODE_METADATA_PREFIX))
}

fn number_bytes(number: usize) -> Vec<u8> {
    let mut bytes = Vec::new();
    put_number(&mut bytes, number);
    bytes
}

/// Appends entries to a section that is a counted list. A recursive type group counts as one entry.
fn appended(content: &[u8], entries: impl ExactSizeIterator<Item = Vec<u8>>) -> Result<Vec<u8>> {
    let mut reader = BinaryReader::new(content, 0);
    let count = reader.read_var_u32()? as usize;
    let before = reader.read_bytes(reader.bytes_remaining())?;
    let mut section = number_bytes(count + entries.len());
    section.extend_from_slice(before);
    entries.for_each(|entry| section.extend(entry));
    Ok(section)
}

fn code_section(bodies: impl Iterator<Item = Vec<u8>>) -> Vec<u8> {
    let (mut count, mut content) = (0, Vec::new());
    for body in bodies {
        count += 1;
        put_number(&mut content, body.len());
        content.extend(body);
    }
    let mut section = number_bytes(count);
    section.extend(content);
    section
}

/// The helpers that a module needs: one for each instruction with its operands.
struct Helpers {
    /// The function index of the first helper.
    first: u32,
    ops: Vec<BulkOp>,
}

impl Helpers {
    fn index(&mut self, op: BulkOp) -> usize {
        let at = self.ops.iter().position(|known| *known == op).unwrap_or_else(|| {
            self.ops.push(op);
            self.ops.len() - 1
        });
        self.first as usize + at
    }

    /// The function bodies of a code section, each without its length.
    fn rewrite(&mut self, code: &[u8]) -> Result<Vec<Vec<u8>>> {
        let bodies = CodeSectionReader::new(BinaryReader::new(code, 0))?;
        bodies.into_iter().map(|body| self.rewrite_body(code, &body?)).collect()
    }

    fn rewrite_body(&mut self, code: &[u8], body: &wasmparser::FunctionBody<'_>) -> Result<Vec<u8>> {
        const CALL: u8 = 0x10;
        let range = body.range();
        let mut rewritten = Vec::with_capacity(range.len());
        let mut copied = range.start;
        let mut operators = body.get_operators_reader()?;
        // The constant on top of the stack, if the previous instruction pushed one.
        let mut constant = None;
        while !operators.eof() {
            let start = operators.original_position();
            let operator = operators.read()?;
            if let Some(op) = BulkOp::of(&operator)
                && constant.is_none_or(|length| length > u64::from(PIECE_BYTES))
            {
                rewritten.extend_from_slice(&code[copied..start]);
                rewritten.push(CALL);
                put_number(&mut rewritten, self.index(op));
                copied = operators.original_position();
            }
            constant = match operator {
                Operator::I32Const { value } => Some(u64::from(value.cast_unsigned())),
                Operator::I64Const { value } => Some(value.cast_unsigned()),
                _ => None,
            };
        }
        rewritten.extend_from_slice(&code[copied..range.end]);
        Ok(rewritten)
    }
}

/// A function that does the same as an instruction, in pieces. Its parameters are the instruction's: destination,
/// source (or value), length in bytes.
struct Helper {
    op: BulkOp,
    parameters: [ValType; 3],
    /// The memories that it accesses: the parameter with the address, the memory's index, its type.
    touched: Vec<(u32, u32, MemoryType)>,
}

const TO: u32 = 0;
const FROM: u32 = 1;
const LENGTH: u32 = 2;

impl Helper {
    fn new(op: BulkOp, indices: &Indices) -> Self {
        let memory = |index: u32| indices.memories.get(index as usize).copied();
        let index_type = |index| match memory(index) {
            Some(memory) if memory.memory64 => ValType::I64,
            // A module with an index of a missing memory is rejected at compilation.
            _ => ValType::I32,
        };
        let (parameters, touched) = match op {
            BulkOp::Fill { memory } => {
                ([index_type(memory), ValType::I32, index_type(memory)], vec![(TO, memory)])
            }
            BulkOp::Init { memory, .. } => {
                ([index_type(memory), ValType::I32, ValType::I32], vec![(TO, memory)])
            }
            BulkOp::Copy { to, from } => {
                let places = [index_type(to), index_type(from)];
                let length = if places == [ValType::I64; 2] { ValType::I64 } else { ValType::I32 };
                ([places[0], places[1], length], vec![(TO, to), (FROM, from)])
            }
        };
        let touched =
            touched.into_iter().filter_map(|(place, index)| Some((place, index, memory(index)?))).collect();
        Self { op, parameters, touched }
    }

    fn type_bytes(&self) -> Vec<u8> {
        const FUNCTION: u8 = 0x60;
        let parameter = |ty: &ValType| if *ty == ValType::I64 { 0x7e } else { 0x7f };
        let mut bytes = vec![FUNCTION, 3];
        bytes.extend(self.parameters.iter().map(parameter));
        bytes.push(0);
        bytes
    }

    fn body(&self) -> Vec<u8> {
        let mut body = Body { function: Function::new([]), helper: self };
        body.write();
        let mut bytes = body.function.into_raw_body();
        bytes.shrink_to_fit();
        bytes
    }
}

/// Writes a helper's instructions.
struct Body<'a> {
    function: Function,
    helper: &'a Helper,
}

impl Body<'_> {
    fn write(&mut self) {
        self.whole_if_small();
        self.whole_if_out_of_bounds();
        let copies = matches!(self.helper.op, BulkOp::Copy { .. });
        if copies {
            // Two indices may name the same memory (by two imports), so the order of the pieces always matters.
            self.wide(FROM).wide(TO).put(&[Instruction::I64LtU, Instruction::If(BlockType::Empty)]);
            self.pieces_from_the_end();
            self.put(&[Instruction::Else]);
            self.pieces_from_the_beginning();
            self.put(&[Instruction::End]);
        } else {
            self.pieces_from_the_beginning();
        }
        self.put(&[Instruction::End]);
    }

    fn put(&mut self, instructions: &[Instruction<'_>]) -> &mut Self {
        for instruction in instructions {
            self.function.instruction(instruction);
        }
        self
    }

    fn ty(&self, local: u32) -> ValType {
        self.helper.parameters[local as usize]
    }

    /// Pushes a parameter as 64 bits.
    fn wide(&mut self, local: u32) -> &mut Self {
        self.put(&[Instruction::LocalGet(local)]);
        if self.ty(local) == ValType::I32 {
            self.put(&[Instruction::I64ExtendI32U]);
        }
        self
    }

    /// Pushes a piece's length, in the type of a parameter.
    fn piece(&mut self, like: u32) -> &mut Self {
        match self.ty(like) {
            ValType::I64 => self.put(&[Instruction::I64Const(i64::from(PIECE_BYTES))]),
            _ => self.put(&[Instruction::I32Const(PIECE_BYTES.cast_signed())]),
        }
    }

    fn step(&mut self, local: u32, forward: bool) -> &mut Self {
        self.put(&[Instruction::LocalGet(local)]).piece(local);
        let step = match (self.ty(local) == ValType::I64, forward) {
            (true, true) => Instruction::I64Add,
            (true, false) => Instruction::I64Sub,
            (false, true) => Instruction::I32Add,
            (false, false) => Instruction::I32Sub,
        };
        self.put(&[step, Instruction::LocalSet(local)])
    }

    /// Emits the original instruction, for the remaining length.
    fn whole(&mut self) -> &mut Self {
        let op = self.helper.op.instruction();
        self.put(&[Instruction::LocalGet(TO), Instruction::LocalGet(FROM), Instruction::LocalGet(LENGTH), op])
    }

    fn whole_if(&mut self) {
        self.put(&[Instruction::If(BlockType::Empty)]).whole().put(&[Instruction::Return, Instruction::End]);
    }

    fn is_more_than_a_piece(&mut self) -> &mut Self {
        self.wide(LENGTH).put(&[Instruction::I64Const(i64::from(PIECE_BYTES)), Instruction::I64GtU])
    }

    fn whole_if_small(&mut self) {
        self.is_more_than_a_piece().put(&[Instruction::I32Eqz]).whole_if();
    }

    /// The instruction then traps before it writes anything.
    fn whole_if_out_of_bounds(&mut self) {
        for (place, index, memory) in self.helper.touched.clone() {
            let page_bytes_log2 = i64::from(memory.page_size_log2());
            let widened = if memory.memory64 { &[][..] } else { &[Instruction::I64ExtendI32U][..] };
            let size = |body: &mut Self| {
                body.put(&[Instruction::MemorySize(index)])
                    .put(widened)
                    .put(&[Instruction::I64Const(page_bytes_log2), Instruction::I64Shl]);
            };
            self.wide(LENGTH);
            size(self);
            self.put(&[Instruction::I64GtU]).wide(place);
            size(self);
            self.wide(LENGTH).put(&[Instruction::I64Sub, Instruction::I64GtU, Instruction::I32Or]).whole_if();
        }
    }

    fn pieces_from_the_beginning(&mut self) {
        let op = self.helper.op.instruction();
        self.put(&[
            Instruction::Loop(BlockType::Empty),
            Instruction::LocalGet(TO),
            Instruction::LocalGet(FROM),
        ]);
        self.piece(LENGTH).put(&[op]);
        self.step(TO, true);
        if !matches!(self.helper.op, BulkOp::Fill { .. }) {
            self.step(FROM, true);
        }
        self.step(LENGTH, false);
        self.is_more_than_a_piece().put(&[Instruction::BrIf(0), Instruction::End]);
        self.whole();
    }

    fn pieces_from_the_end(&mut self) {
        let op = self.helper.op.instruction();
        self.put(&[Instruction::Loop(BlockType::Empty)]).step(LENGTH, false);
        for place in [TO, FROM] {
            let wide = self.ty(place) == ValType::I64;
            self.put(&[Instruction::LocalGet(place), Instruction::LocalGet(LENGTH)]);
            match (wide, self.ty(LENGTH)) {
                (true, ValType::I32) => self.put(&[Instruction::I64ExtendI32U, Instruction::I64Add]),
                (true, _) => self.put(&[Instruction::I64Add]),
                (false, _) => self.put(&[Instruction::I32Add]),
            };
        }
        self.piece(LENGTH).put(&[op]);
        self.is_more_than_a_piece().put(&[Instruction::BrIf(0), Instruction::End]);
        self.whole();
    }
}

#[cfg(test)]
mod tests;
