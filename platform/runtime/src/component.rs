//! Reads a wasm file without compiling it: the worlds that it exports, its imports, and whether a wasm host can run it.
//! The CLI checks a component with it before the upload, the server before accepting it.

use std::fmt;

use wasmparser::{Encoding, Parser, Payload, Validator, WasmFeatures};

pub mod known;

/// The number of elements that one table of an instance may have: the host's memory for each counts against a
/// function's limit.
pub const TABLE_ELEMENTS_MAX: usize = 200_000;

/// The interfaces of a component that can run here.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ComponentReport {
    /// In the order of preference: the host calls the first.
    pub worlds: Vec<ComponentWorld>,
    /// Every import by name, such as `wasi:io/streams@0.2.6`.
    pub imports: Vec<String>,
    pub exports: Vec<String>,
}

/// The world that a component implements.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum ComponentWorld {
    /// Answers requests: `wasi:http/handler@0.3`.
    HttpWasi0_3,
    /// Answers requests: `wasi:http/incoming-handler@0.2`.
    HttpWasi0_2,
    /// Runs to its end: `wasi:cli/run@0.3`.
    CommandWasi0_3,
    /// Runs to its end: `wasi:cli/run@0.2`.
    CommandWasi0_2,
}

impl ComponentWorld {
    const ALL: [Self; 4] = [Self::HttpWasi0_3, Self::HttpWasi0_2, Self::CommandWasi0_3, Self::CommandWasi0_2];

    /// The interface and its version line, such as `0.2`.
    fn interface(self) -> (&'static str, &'static str) {
        match self {
            Self::HttpWasi0_3 => ("wasi:http/handler", "0.3"),
            Self::HttpWasi0_2 => ("wasi:http/incoming-handler", "0.2"),
            Self::CommandWasi0_3 => ("wasi:cli/run", "0.3"),
            Self::CommandWasi0_2 => ("wasi:cli/run", "0.2"),
        }
    }

    pub fn answers_requests(self) -> bool {
        matches!(self, Self::HttpWasi0_2 | Self::HttpWasi0_3)
    }
}

impl fmt::Display for ComponentWorld {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (name, version) = self.interface();
        write!(f, "{name}@{version}")
    }
}

impl ComponentReport {
    /// The HTTP world that the component exports, if any.
    pub fn http(&self) -> Option<ComponentWorld> {
        self.worlds.iter().copied().find(|world| world.answers_requests())
    }
}

/// The reason why a file cannot run here, as shown to the user who uploads it.
#[derive(Clone, Debug, thiserror::Error, PartialEq, Eq)]
pub enum ComponentRefused {
    #[error("not a wasm file: it starts with {starts_with}")]
    NotWasm { starts_with: String },
    #[error(
        "a core module, not a component: `mayfly deploy` and `mayfly artifact push` make a component of one; other \
         clients build for the target wasm32-wasip2, or use `wasm-tools component new`"
    )]
    CoreModule,
    #[error("not a valid component: {0}")]
    Malformed(String),
    #[error("it can never run here: {0}")]
    CannotRun(String),
    #[error("it imports what this host does not have: {}", .0.join("; "))]
    UnknownImports(Vec<String>),
    #[error(
        "it exports none of wasi:http/incoming-handler@0.2, wasi:http/handler@0.3, wasi:cli/run@0.2, \
         wasi:cli/run@0.3; {}",
        exported(.0)
    )]
    WrongWorld(Vec<String>),
}

fn exported(exports: &[String]) -> String {
    if exports.is_empty() {
        "it exports nothing".into()
    } else {
        format!("it exports {}", exports.join(", "))
    }
}

/// Inspects a file's content. Fast: it parses and validates, and does not compile.
pub fn inspect(content: &[u8]) -> Result<ComponentReport, ComponentRefused> {
    if !content.starts_with(b"\0asm") {
        return Err(ComponentRefused::NotWasm { starts_with: beginning(content) });
    }
    let (imports, exports) = interfaces(content)?;
    let malformed = |error: wasmparser::BinaryReaderError| ComponentRefused::Malformed(error.to_string());
    Validator::new_with_features(features()).validate_all(content).map_err(malformed)?;
    runnable(content)?;
    let unknown: Vec<String> = imports.iter().filter_map(|name| known::missing(name)).collect();
    if !unknown.is_empty() {
        return Err(ComponentRefused::UnknownImports(unknown));
    }
    let worlds: Vec<ComponentWorld> =
        ComponentWorld::ALL.into_iter().filter(|world| has(*world, &exports)).collect();
    if worlds.is_empty() {
        return Err(ComponentRefused::WrongWorld(exports));
    }
    Ok(ComponentReport { worlds, imports, exports })
}

/// Refuses valid components whose memories or tables exceed what an instance supports.
fn runnable(content: &[u8]) -> Result<(), ComponentRefused> {
    let malformed = |error: wasmparser::BinaryReaderError| ComponentRefused::Malformed(error.to_string());
    for payload in Parser::new(0).parse_all(content) {
        match payload.map_err(malformed)? {
            Payload::MemorySection(section) => {
                for memory in section {
                    if memory.map_err(malformed)?.shared {
                        return Err(ComponentRefused::CannotRun(
                            "it has a shared memory, and instances here have one thread: build it without threads"
                                .to_owned(),
                        ));
                    }
                }
            }
            Payload::TableSection(section) => {
                for table in section {
                    let elements = table.map_err(malformed)?.ty.initial;
                    if elements > TABLE_ELEMENTS_MAX as u64 {
                        return Err(ComponentRefused::CannotRun(format!(
                            "it has a table of {elements} elements; a table has at most {TABLE_ELEMENTS_MAX} here"
                        )));
                    }
                }
            }
            _ => {}
        }
    }
    Ok(())
}

fn features() -> WasmFeatures {
    WasmFeatures::default() | WasmFeatures::CM_ASYNC
}

fn has(world: ComponentWorld, exports: &[String]) -> bool {
    let (interface, version) = world.interface();
    exports.iter().any(|export| {
        let found = export.split_once('@');
        found.is_some_and(|(name, found)| name == interface && known::is_version(found, version))
    })
}

/// The names of the outermost component's imports and exports.
fn interfaces(content: &[u8]) -> Result<(Vec<String>, Vec<String>), ComponentRefused> {
    let malformed = |error: wasmparser::BinaryReaderError| ComponentRefused::Malformed(error.to_string());
    let (mut imports, mut exports) = (Vec::new(), Vec::new());
    let mut depth = 0u32;
    for payload in Parser::new(0).parse_all(content) {
        match payload.map_err(malformed)? {
            Payload::Version { encoding: Encoding::Module, .. } if depth == 0 => {
                return Err(ComponentRefused::CoreModule);
            }
            Payload::ModuleSection { .. } | Payload::ComponentSection { .. } => depth += 1,
            Payload::End(_) => depth = depth.saturating_sub(1),
            Payload::ComponentImportSection(section) if depth == 0 => {
                for import in section {
                    imports.push(import.map_err(malformed)?.name.name.to_owned());
                }
            }
            Payload::ComponentExportSection(section) if depth == 0 => {
                for export in section {
                    exports.push(export.map_err(malformed)?.name.name.to_owned());
                }
            }
            _ => {}
        }
    }
    Ok((imports, exports))
}

/// The first bytes of a file that is not wasm, as text if they are text.
fn beginning(content: &[u8]) -> String {
    const SHOWN: usize = 16;
    let start = &content[..content.len().min(SHOWN)];
    match str::from_utf8(start) {
        _ if start.is_empty() => "nothing: it is empty".into(),
        Ok(text) if text.chars().all(|c| !c.is_control() || c.is_whitespace()) => format!("{text:?}"),
        _ => start.iter().map(|byte| format!("{byte:02x}")).collect::<Vec<_>>().join(" "),
    }
}

#[cfg(test)]
mod tests;
