//! A container on simulated GPUs that runs the C program `probe.c`. For the tests and the benchmark.
//!
//! Cargo builds the simulated drivers as the dev-dependencies `mayfly_gpu_fake_cuda` and `mayfly_gpu_fake_nvml`.
#![expect(dead_code, reason = "each user takes what it needs")]

use std::{
    io::{BufRead, BufReader, Write},
    path::{Path, PathBuf},
    process::{Child, ChildStdout, Command, Stdio},
};

use mayfly_gpu_proto::{
    CUDA_SONAME, DeviceLimit, FAKE_CUDA_FILE, FAKE_NVML_FILE, LIMITS_ENV, LimitsFile, NVML_SONAME, SHIM_FILE,
    sim::{STATE_ENV, SimFile, parse_gpus},
};

/// A container on two fake GPUs; the first one is limited.
pub(crate) struct LimitedContainer {
    folder: tempfile::TempDir,
    pub(crate) limits: LimitsFile,
    pub(crate) sim: SimFile,
}

impl LimitedContainer {
    /// `None` without a C compiler.
    #[expect(clippy::print_stdout, reason = "the runner counts the lines of skipped tests")]
    pub(crate) fn new(test: &str, memory_bytes: u64, core_percent: u32) -> Option<Self> {
        if Command::new("gcc").arg("--version").output().is_err() {
            println!("SKIPPED {test}: no gcc");
            return None;
        }
        let folder = tempfile::tempdir().unwrap();
        let gpus = parse_gpus("2xH100").unwrap();
        let sim = SimFile::create(&folder.path().join("sim"), &gpus).unwrap();
        let limit =
            DeviceLimit { uuid: gpus[0].uuid.clone(), memory_bytes, core_percent, elastic_percent: 0 };
        let limits = LimitsFile::create(&folder.path().join("limits"), &[limit]).unwrap();
        for (file, name) in
            [(FAKE_CUDA_FILE, CUDA_SONAME), (FAKE_NVML_FILE, NVML_SONAME), (SHIM_FILE, SHIM_FILE)]
        {
            std::os::unix::fs::symlink(library(file), folder.path().join(name)).unwrap();
        }
        let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/probe.c");
        for (output, arguments) in
            [("probe", &[][..]), ("probe-linked", &["-DLINKED", "-l:libcuda.so.1"][..])]
        {
            let mut gcc = Command::new("gcc");
            gcc.arg("-w").arg("-o").arg(folder.path().join(output)).arg(&source).args(arguments);
            gcc.arg(format!("-L{}", folder.path().display())).args(["-ldl", "-lpthread"]);
            assert!(gcc.status().unwrap().success(), "gcc cannot compile {output}");
        }
        Some(Self { folder, limits, sim })
    }

    pub(crate) fn command(&self, arguments: &[&str]) -> Command {
        let linked = arguments[0] == "linked";
        let mut command =
            Command::new(self.folder.path().join(if linked { "probe-linked" } else { "probe" }));
        command.args(arguments).env("LD_LIBRARY_PATH", self.folder.path());
        command.env("LD_PRELOAD", self.folder.path().join(SHIM_FILE));
        command
            .env(LIMITS_ENV, self.folder.path().join("limits"))
            .env(STATE_ENV, self.folder.path().join("sim"));
        command
    }

    /// A program without limits.
    pub(crate) fn unlimited(&self, arguments: &[&str]) -> Command {
        let mut command = self.command(arguments);
        command.env_remove("LD_PRELOAD").env_remove(LIMITS_ENV);
        command
    }

    /// Makes a program of another container use this one's GPUs.
    pub(crate) fn lend_gpus(&self, command: &mut Command) {
        command.env(STATE_ENV, self.folder.path().join("sim"));
    }

    pub(crate) fn run(&self, arguments: &[&str]) -> String {
        text_of(&mut self.command(arguments))
    }

    /// The share of the first GPU's time in percent that programs got so far, relative to the run time in the last
    /// program's output `LAUNCHES NANOSECONDS`.
    pub(crate) fn share(&self, text: &str) -> f64 {
        let ns: f64 = text.split_whitespace().nth(1).unwrap().parse().unwrap();
        #[expect(clippy::cast_precision_loss, reason = "a share is compared to within percent")]
        let used = self.sim.device(0).busy_ns.load(std::sync::atomic::Ordering::Relaxed) as f64;
        used * 100.0 / ns
    }

    pub(crate) fn spawn(&self, arguments: &[&str]) -> RunningProgram {
        let mut command = self.command(arguments);
        let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
        let output = BufReader::new(child.stdout.take().unwrap());
        RunningProgram { child, output }
    }
}

/// A program that is killed at the end of the test.
pub(crate) struct RunningProgram {
    child: Child,
    output: BufReader<ChildStdout>,
}

impl RunningProgram {
    pub(crate) fn line(&mut self) -> String {
        let mut line = String::new();
        self.output.read_line(&mut line).unwrap();
        line.trim().to_owned()
    }

    pub(crate) fn kill(&mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
    }

    pub(crate) fn ask(&mut self) -> String {
        self.child.stdin.as_mut().unwrap().write_all(b"\n").unwrap();
        self.line()
    }
}

impl Drop for RunningProgram {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// The output of a program.
pub(crate) fn text_of(command: &mut Command) -> String {
    let output = command.output().unwrap();
    let text = String::from_utf8_lossy(&output.stdout).trim().to_owned();
    assert!(output.status.success(), "{command:?}: {} {text}", output.status);
    text
}

/// A library that cargo built: beside a test's executable, or in the folder of dependencies beside that of an example.
fn library(file: &str) -> PathBuf {
    let executable = std::env::current_exe().unwrap();
    let folders =
        executable.ancestors().skip(1).take(2).flat_map(|folder| [folder.to_owned(), folder.join("deps")]);
    let found = folders.map(|folder| folder.join(file)).find(|path| path.exists());
    found.unwrap_or_else(|| panic!("cargo did not build {file}"))
}
