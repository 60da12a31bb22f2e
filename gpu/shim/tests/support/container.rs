//! A container with GPUs that runs the C program `probe.c`. For the tests and the benchmark.
//!
//! The GPUs are simulated, or with `MAYFLY_TEST_GPU=real` the machine's first one. Cargo builds the simulated drivers as
//! the dev-dependencies `mayfly_gpu_fake_cuda` and `mayfly_gpu_fake_nvml`.
#![expect(dead_code, reason = "each user takes what it needs")]

use std::{
    io::{BufRead, BufReader, Write},
    path::PathBuf,
    process::{Child, ChildStdout, Command, Stdio},
    sync::OnceLock,
};

use mayfly_gpu_proto::{
    CUDA_SONAME, DeviceLimit, FAKE_CUDA_FILE, FAKE_NVML_FILE, LIMITS_ENV, LimitsFile, NVML_SONAME, SHIM_FILE,
    sim::{STATE_ENV, SimFile, parse_gpus},
};

/// A program in C that uses the driver in a way of its choice.
const PROBE: &str = include_str!("../probe.c");

/// A container whose first GPU is limited. Of simulated GPUs there are two.
pub(crate) struct LimitedContainer {
    folder: tempfile::TempDir,
    pub(crate) limits: LimitsFile,
    /// `None`: a real GPU.
    pub(crate) sim: Option<SimFile>,
}

impl LimitedContainer {
    /// `None` without a C compiler.
    pub(crate) fn new(test: &str, memory_bytes: u64, core_percent: u32) -> Option<Self> {
        if Command::new("gcc").arg("--version").output().is_err() {
            skip(test, "no gcc");
            return None;
        }
        let folder = tempfile::tempdir().unwrap();
        let sim = (!is_real()).then(|| {
            let sim = SimFile::create(&folder.path().join("sim"), &parse_gpus("2xH100").unwrap()).unwrap();
            for (file, name) in [(FAKE_CUDA_FILE, CUDA_SONAME), (FAKE_NVML_FILE, NVML_SONAME)] {
                std::os::unix::fs::symlink(library(file), folder.path().join(name)).unwrap();
            }
            sim
        });
        std::os::unix::fs::symlink(library(SHIM_FILE), folder.path().join(SHIM_FILE)).unwrap();
        let uuid = sim.as_ref().map_or_else(real_uuid, |sim| sim.describe(0).uuid);
        let limit = DeviceLimit { uuid, memory_bytes, core_percent, elastic_percent: 0 };
        let limits = LimitsFile::create(&folder.path().join("limits"), &[limit]).unwrap();
        let source = folder.path().join("probe.c");
        std::fs::write(&source, PROBE).unwrap();
        let linked = ["-DLINKED".to_owned(), cuda_library(&folder).display().to_string()];
        for (output, arguments) in [("probe", &[][..]), ("probe-linked", &linked)] {
            let mut gcc = Command::new("gcc");
            gcc.arg("-w").arg("-o").arg(folder.path().join(output)).arg(&source).args(arguments);
            gcc.args(["-ldl", "-lpthread"]);
            assert!(gcc.status().unwrap().success(), "gcc cannot compile {output}");
        }
        Some(Self { folder, limits, sim })
    }

    /// Lends the container the whole GPU, so that its launches are measured but never delayed.
    pub(crate) fn lend_idle_time(&self) {
        let limit = self.limits.usage().remove(0).limit;
        self.limits.set_limit(&DeviceLimit { elastic_percent: 100, ..limit }).unwrap();
        let record = &self.limits.region().devices()[0];
        record.granted_percent.store(100, std::sync::atomic::Ordering::Relaxed);
    }

    /// The simulation, for a test that needs it; without it the test is skipped.
    pub(crate) fn simulation(&self, test: &str) -> Option<&SimFile> {
        if self.sim.is_none() {
            skip(test, "not a simulated GPU");
        }
        self.sim.as_ref()
    }

    pub(crate) fn command(&self, arguments: &[&str]) -> Command {
        let mut command = self.program(arguments);
        command.env("LD_PRELOAD", self.folder.path().join(SHIM_FILE));
        command.env(LIMITS_ENV, self.folder.path().join("limits"));
        if self.sim.is_none() {
            command.env("PROBE_COUNT_PER_US", self.count_per_us());
        }
        command
    }

    fn program(&self, arguments: &[&str]) -> Command {
        let linked = arguments[0] == "linked";
        let mut command =
            Command::new(self.folder.path().join(if linked { "probe-linked" } else { "probe" }));
        command.args(arguments);
        if self.sim.is_some() {
            command.env("LD_LIBRARY_PATH", self.folder.path()).env(STATE_ENV, self.folder.path().join("sim"));
        }
        command
    }

    /// The repetitions of the probe's kernel in a microsecond of the real GPU.
    fn count_per_us(&self) -> &'static str {
        static COUNT: OnceLock<String> = OnceLock::new();
        COUNT.get_or_init(|| text_of(&mut self.program(&["dlsym", "calibrate"])))
    }

    /// A program without limits.
    pub(crate) fn unlimited(&self, arguments: &[&str]) -> Command {
        let mut command = self.command(arguments);
        command.env_remove("LD_PRELOAD").env_remove(LIMITS_ENV);
        command
    }

    /// Makes a program of another container use this one's simulated GPUs.
    pub(crate) fn lend_gpus(&self, command: &mut Command) {
        if self.sim.is_some() {
            command.env(STATE_ENV, self.folder.path().join("sim"));
        }
    }

    pub(crate) fn run(&self, arguments: &[&str]) -> String {
        text_of(&mut self.command(arguments))
    }

    /// The share of the first GPU's time in percent that the container's only program got, from its output `LAUNCHES
    /// NANOSECONDS BUSY`. `BUSY` is the time of the kernels on a real GPU.
    pub(crate) fn share(&self, text: &str) -> f64 {
        let numbers: Vec<f64> = text.split_whitespace().map(|number| number.parse().unwrap()).collect();
        #[expect(clippy::cast_precision_loss, reason = "a share is compared to within percent")]
        let simulated =
            |sim: &SimFile| sim.device(0).busy_ns.load(std::sync::atomic::Ordering::Relaxed) as f64;
        self.sim.as_ref().map_or(numbers[2], simulated) * 100.0 / numbers[1]
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

/// Whether programs use the machine's driver.
pub(crate) fn is_real() -> bool {
    std::env::var_os("MAYFLY_TEST_GPU").is_some_and(|gpu| gpu == "real")
}

#[expect(clippy::print_stdout, reason = "the runner counts the lines of skipped tests")]
pub(crate) fn skip(test: &str, reason: &str) {
    println!("SKIPPED {test}: {reason}");
}

fn real_uuid() -> String {
    let text = text_of(Command::new("nvidia-smi").args(["--query-gpu=uuid", "--format=csv,noheader"]));
    text.lines().next().unwrap().to_owned()
}

/// The driver's library, for a linked program.
fn cuda_library(folder: &tempfile::TempDir) -> PathBuf {
    let simulated = folder.path().join(CUDA_SONAME);
    if simulated.exists() {
        return simulated;
    }
    let known = text_of(Command::new("ldconfig").arg("-p"));
    let path = known.lines().find(|line| line.contains("libcuda.so.1 ") && line.contains("x86-64"));
    PathBuf::from(path.and_then(|line| line.rsplit(" => ").next()).expect("ldconfig knows no libcuda.so.1"))
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
