//! Memory that a process exports and others open (`cuIpcGetMemHandle`, `cuIpcOpenMemHandle`): it counts once, for the
//! exporter.

use std::{
    io::{BufRead as _, BufReader, Write as _},
    path::{Path, PathBuf},
    process::{Child, ChildStdout, Command, Stdio},
};

#[path = "support/container.rs"]
mod container;
use container::LimitedContainer;

const MIB: u64 = 1 << 20;

/// The C program `ipc.c`, compiled.
struct IpcProgram {
    path: PathBuf,
    _folder: tempfile::TempDir,
}

impl IpcProgram {
    fn compile() -> Self {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("ipc");
        let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/ipc.c");
        let compiled = Command::new("gcc").arg("-o").arg(&path).arg(source).arg("-ldl").status();
        assert!(compiled.unwrap().success(), "gcc cannot compile ipc.c");
        Self { path, _folder: folder }
    }

    /// Starts it in a container, on the GPUs of `gpus`.
    fn start(&self, container: &LimitedContainer, gpus: &LimitedContainer, arguments: &[&str]) -> Running {
        let mut probe = container.command(&["dlsym"]);
        gpus.lend_gpus(&mut probe);
        let mut command = Command::new(&self.path);
        command.args(arguments).stdin(Stdio::piped()).stdout(Stdio::piped());
        for (name, value) in probe.get_envs() {
            command.env(name, value.unwrap());
        }
        let mut child = command.spawn().unwrap();
        let output = BufReader::new(child.stdout.take().unwrap());
        Running { child, output }
    }
}

/// A program that is killed at the end of the test.
struct Running {
    child: Child,
    output: BufReader<ChildStdout>,
}

impl Running {
    fn line(&mut self) -> String {
        let mut line = String::new();
        self.output.read_line(&mut line).unwrap();
        line.trim().to_owned()
    }

    fn ask(&mut self) -> String {
        self.child.stdin.as_mut().unwrap().write_all(b"\n").unwrap();
        self.line()
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// The exporter's result and the handle.
fn handle(exporter: &mut Running) -> String {
    let line = exporter.line();
    line.strip_prefix("0 ").unwrap_or_else(|| panic!("no handle: {line}")).to_owned()
}

fn used(container: &LimitedContainer) -> u64 {
    container.limits.usage()[0].memory_bytes
}

#[test]
fn memory_opened_by_another_process_counts_once() {
    let Some(container) = LimitedContainer::new("memory_opened", 64 * MIB, 0) else { return };
    let program = IpcProgram::compile();
    let mut exporter = program.start(&container, &container, &["export", &(40 * MIB).to_string()]);
    let handle = handle(&mut exporter);
    assert_eq!(used(&container), 40 * MIB);
    // The other process may allocate what the limit leaves, to the byte.
    let rest = (24 * MIB).to_string();
    let mut other = program.start(&container, &container, &["open", &handle, &rest]);
    assert_eq!(
        other.line(),
        "0 0 2 0 0 1",
        "opened, fits, over the limit, written, closed, not closed twice"
    );
    assert_eq!(used(&container), 64 * MIB, "closing releases nothing of the exporter's");
    drop(other);
    assert_eq!(exporter.ask(), "0");
    assert_eq!(exporter.ask(), "1", "it was freed");
    assert_eq!(container.run(&["dlsym", "halves", "alloc", &(32 * MIB).to_string()]), "0 0 2 0 0 2 1 0 2");
}

#[test]
fn memory_of_another_container_counts_for_that_one() {
    let Some(exporting) = LimitedContainer::new("memory_of_another", 64 * MIB, 0) else { return };
    let Some(opening) = LimitedContainer::new("memory_of_another", 8 * MIB, 0) else { return };
    let program = IpcProgram::compile();
    let mut exporter = program.start(&exporting, &exporting, &["export", &(40 * MIB).to_string()]);
    let handle = handle(&mut exporter);
    let mut other = program.start(&opening, &exporting, &["open", &handle, &(8 * MIB).to_string()]);
    assert_eq!(other.line(), "0 0 2 0 0 1");
    assert_eq!((used(&exporting), used(&opening)), (40 * MIB, 8 * MIB));
}
