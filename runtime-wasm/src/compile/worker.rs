//! The compiler process: reads the component from standard input and writes its machine code to standard output.

use std::{
    ffi::OsStr,
    io::{self, Read as _, Write as _},
    path::PathBuf,
    process::{ExitCode, ExitStatus, Stdio},
    time::Duration,
};

use rustix::process::{Resource, Rlimit, Signal};
use tokio::{
    io::{AsyncRead, AsyncReadExt as _, AsyncWriteExt as _},
    process::{Child, Command},
};

use super::CompileError;
use crate::engine::{self, AsyncModel};

/// The exit status of a worker that rejects its component; the reason is on its standard error.
const EXIT_INVALID: u8 = 3;
/// The exit status of a worker that failed for another reason: a retry may succeed.
const EXIT_LOST: u8 = 4;
/// The exit status of a worker that was started with wrong arguments.
const EXIT_USAGE: u8 = 2;
/// The maximum duration of a worker on a busy machine, as a multiple of its timeout.
const TIMEOUTS_MAX: u32 = 6;
/// Signals sent from outside. Signals that the process causes itself (abort, segmentation fault) are blamed on the
/// component: a retry would end in the same way.
const EXTERNAL_SIGNALS: [Signal; 6] =
    [Signal::KILL, Signal::TERM, Signal::INT, Signal::HUP, Signal::QUIT, Signal::XCPU];
/// The maximum number of bytes that are read from a worker's standard error.
const MESSAGE_BYTES_MAX: u64 = 16 << 10;

/// The command that starts a compiler process.
pub(super) struct CompilerProcess {
    /// Started as `PROGRAM compile ARG…`; must pass the arguments to [`run_worker`].
    pub(super) program: PathBuf,
    pub(super) threads: usize,
    pub(super) memory_bytes_max: u64,
    pub(super) linear_memory_bytes_max: u64,
    pub(super) timeout: Duration,
}

impl CompilerProcess {
    /// The timeout applies to processor time: on a busy machine the duration may be long for reasons outside the
    /// component.
    pub(super) async fn compile(&self, model: AsyncModel, wasm: &[u8]) -> Result<Vec<u8>, CompileError> {
        let child = self.start(model)?;
        let pid = child.id();
        let mut running = std::pin::pin!(self.run(child, wasm));
        for _ in 0..TIMEOUTS_MAX {
            if let Ok(done) = tokio::time::timeout(self.timeout, &mut running).await {
                return done;
            }
            if pid.and_then(processor_time).is_some_and(|used| used >= self.timeout) {
                return Err(CompileError::Invalid(format!(
                    "compilation took longer than {:?}",
                    self.timeout
                )));
            }
        }
        Err(CompileError::Lost(
            "the compiler got too little processor time: is the machine overloaded?".into(),
        ))
    }

    fn start(&self, model: AsyncModel) -> Result<Child, CompileError> {
        Command::new(&self.program)
            .arg0("mayfly")
            .arg("compile")
            .args([model.name().to_owned(), self.linear_memory_bytes_max.to_string()])
            .args([self.threads.to_string(), self.memory_bytes_max.to_string()])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            // A Ctrl-C is meant for the server, which ends this process when it ends.
            .process_group(0)
            .kill_on_drop(true)
            .spawn()
            .map_err(|error| CompileError::Lost(format!("{}: {error}", self.program.display())))
    }

    async fn run(&self, mut child: Child, wasm: &[u8]) -> Result<Vec<u8>, CompileError> {
        let lost = |error: io::Error| CompileError::Lost(error.to_string());
        let (Some(mut stdin), Some(stdout), Some(stderr)) =
            (child.stdin.take(), child.stdout.take(), child.stderr.take())
        else {
            return Err(CompileError::Lost("the compiler has no pipes".into()));
        };
        let give = async move {
            // A worker may reject a component before it has read all of it: its exit status decides.
            stdin.write_all(wasm).await.ok();
        };
        let ((), machine_code, message) =
            tokio::join!(give, read(stdout, u64::MAX), read(stderr, MESSAGE_BYTES_MAX));
        let status = child.wait().await.map_err(lost)?;
        if status.success() {
            return machine_code.map_err(lost);
        }
        let message = String::from_utf8_lossy(&message.unwrap_or_default()).trim().to_owned();
        Err(self.failed(status, message))
    }

    fn failed(&self, status: ExitStatus, message: String) -> CompileError {
        use std::os::unix::process::ExitStatusExt as _;
        if status.code() == Some(EXIT_INVALID.into()) {
            return CompileError::Invalid(message);
        }
        if status.code() == Some(EXIT_LOST.into()) {
            return CompileError::Lost(message);
        }
        // Killed from outside: by the kernel's or another out-of-memory killer, the service manager, or an operator.
        if let Some(signal) = status.signal()
            && EXTERNAL_SIGNALS.iter().any(|ending| ending.as_raw() == signal)
        {
            return CompileError::Lost(format!(
                "the compiler was killed ({status}); was the machine out of memory?"
            ));
        }
        let memory_mib = self.memory_bytes_max >> 20;
        CompileError::Invalid(format!(
            "the compiler crashed ({status}; its memory limit is {memory_mib} MiB): {message}"
        ))
    }
}

/// The processor time of a process with all its threads; `None` when it has ended.
fn processor_time(pid: u32) -> Option<Duration> {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    // proc(5): after the name in parentheses utime is the twelfth field, stime the thirteenth.
    let (_, fields) = stat.rsplit_once(')')?;
    let mut fields = fields.split_ascii_whitespace().skip(11);
    let mut ticks = || fields.next()?.parse::<u64>().ok();
    let ticks = ticks()? + ticks()?;
    Some(Duration::from_millis(ticks * 1000 / rustix::param::clock_ticks_per_second().max(1)))
}

async fn read(from: impl AsyncRead + Unpin, bytes_max: u64) -> io::Result<Vec<u8>> {
    let mut content = Vec::new();
    from.take(bytes_max).read_to_end(&mut content).await?;
    Ok(content)
}

/// Compiles one component, as the process that a host with [`CompileIn::Process`](crate::CompileIn::Process) started:
/// `args` are the arguments after `compile`. The output is machine code.
pub fn run_worker<S: AsRef<OsStr>>(args: &[S]) -> ExitCode {
    let Some(job) = Job::parse(args) else {
        complain("this command is for internal use: the server starts it to compile a component");
        return ExitCode::from(EXIT_USAGE);
    };
    job.lower_priority();
    let (status, error) = match job.run() {
        Ok(()) => return ExitCode::SUCCESS,
        Err(Failure::Component(error)) => (EXIT_INVALID, error),
        Err(Failure::Machine(error)) => (EXIT_LOST, error),
    };
    complain(&format!("{error:#}"));
    ExitCode::from(status)
}

fn complain(why: &str) {
    // The reader may have exited.
    writeln!(io::stderr(), "{why}").ok();
}

/// Why a component was not compiled.
enum Failure {
    /// The component is invalid.
    Component(wasmtime::Error),
    /// No threads, no memory, or a closed pipe.
    Machine(wasmtime::Error),
}

impl From<io::Error> for Failure {
    fn from(error: io::Error) -> Self {
        Self::Machine(error.into())
    }
}

struct Job {
    model: AsyncModel,
    linear_memory_bytes_max: u64,
    threads: usize,
    memory_bytes_max: u64,
}

impl Job {
    fn parse<S: AsRef<OsStr>>(args: &[S]) -> Option<Self> {
        let [model, linear_memory_bytes_max, threads, memory_bytes_max] = args else { return None };
        let number = |text: &S| text.as_ref().to_str()?.parse().ok();
        Some(Self {
            model: AsyncModel::named(model.as_ref().to_str()?)?,
            linear_memory_bytes_max: number(linear_memory_bytes_max)?,
            threads: usize::try_from(number(threads)?).ok()?,
            memory_bytes_max: number(memory_bytes_max)?,
        })
    }

    /// Lowers the priority for the processor and raises that for the out-of-memory killer. Failures are ignored:
    /// compilation works without.
    fn lower_priority(&self) {
        rustix::process::setpriority_process(None, super::NICENESS).ok();
        std::fs::write("/proc/self/oom_score_adj", "1000").ok();
        let limit = Some(self.memory_bytes_max);
        rustix::process::setrlimit(Resource::Data, Rlimit { current: limit, maximum: limit }).ok();
    }

    fn run(&self) -> Result<(), Failure> {
        let mut wasm = Vec::new();
        io::stdin().lock().read_to_end(&mut wasm)?;
        let settings = engine::settings(self.model, self.linear_memory_bytes_max);
        let engine = wasmtime::Engine::new(&settings).map_err(Failure::Machine)?;
        let threads = super::threads(self.threads).map_err(io::Error::other)?;
        let compiled = threads.install(|| super::machine_code(&engine, &wasm));
        let machine_code = compiled.map_err(Failure::Component)?;
        io::stdout().lock().write_all(&machine_code)?;
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::{fs, os::unix::fs::PermissionsExt as _, path::Path};

    use super::*;

    /// A fake compiler that is a shell script.
    fn worker(folder: &Path, script: &str) -> CompilerProcess {
        let program = folder.join("compiler");
        fs::write(&program, format!("#!/bin/sh\n{script}\n")).unwrap();
        fs::set_permissions(&program, fs::Permissions::from_mode(0o755)).unwrap();
        CompilerProcess {
            program,
            threads: 2,
            memory_bytes_max: 64 << 20,
            linear_memory_bytes_max: 1 << 20,
            timeout: Duration::from_secs(60),
        }
    }

    #[tokio::test]
    async fn standard_output_of_the_compiler_is_the_machine_code() {
        let folder = tempfile::tempdir().unwrap();
        let echo = worker(folder.path(), "echo \"$@\"; cat");
        let made = echo.compile(AsyncModel::Async, b"wasm").await.unwrap();
        assert_eq!(String::from_utf8(made).unwrap(), "compile async 1048576 2 67108864\nwasm");
    }

    #[tokio::test]
    async fn a_compiler_may_end_without_reading() {
        let folder = tempfile::tempdir().unwrap();
        let deaf = worker(folder.path(), "echo no such import >&2; exit 3");
        let large = vec![0; 4 << 20];
        match deaf.compile(AsyncModel::Sync, &large).await {
            Err(CompileError::Invalid(why)) => assert_eq!(why, "no such import"),
            other => panic!("{other:?}"),
        }
    }

    #[tokio::test]
    async fn external_signals_and_exit_status_4_are_retryable() {
        let folder = tempfile::tempdir().unwrap();
        // Other signals may be ignored where the tests run, and a shell inherits that.
        for signal in ["KILL", "TERM", "XCPU"] {
            let killed = worker(folder.path(), &format!("kill -{signal} $$"));
            match killed.compile(AsyncModel::Sync, b"").await {
                Err(CompileError::Lost(why)) => assert!(why.contains("killed"), "{why}"),
                other => panic!("{signal}: {other:?}"),
            }
        }
        let hungry = worker(folder.path(), "echo no threads >&2; exit 4");
        match hungry.compile(AsyncModel::Sync, b"").await {
            Err(CompileError::Lost(why)) => assert_eq!(why, "no threads"),
            other => panic!("{other:?}"),
        }
        let broken = worker(folder.path(), "echo out of memory >&2; kill -ABRT $$");
        match broken.compile(AsyncModel::Sync, b"").await {
            Err(CompileError::Invalid(why)) => {
                assert!(why.contains("64 MiB") && why.contains("out of memory"), "{why}");
            }
            other => panic!("{other:?}"),
        }
        let missing = CompilerProcess { program: folder.path().join("none"), ..broken };
        assert!(matches!(missing.compile(AsyncModel::Sync, b"").await, Err(CompileError::Lost(_))));
    }

    #[tokio::test]
    async fn a_hanging_compiler_is_killed() {
        let folder = tempfile::tempdir().unwrap();
        let pid = folder.path().join("pid");
        let endless = worker(folder.path(), &format!("echo $$ > {}; exec sleep 1000", pid.display()));
        let endless = CompilerProcess { timeout: Duration::from_millis(400), ..endless };
        // It used no processor time: a retry may succeed.
        match endless.compile(AsyncModel::Sync, b"").await {
            Err(CompileError::Lost(why)) => assert!(why.contains("overloaded"), "{why}"),
            other => panic!("{other:?}"),
        }
        // On a busy machine it may have been killed before it wrote its process id.
        let Ok(pid) = fs::read_to_string(pid) else { return };
        while Path::new("/proc").join(pid.trim()).exists() {
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    }

    #[tokio::test]
    async fn a_component_that_takes_too_much_of_the_processor_is_refused() {
        let folder = tempfile::tempdir().unwrap();
        let busy = worker(folder.path(), "while :; do :; done");
        let busy = CompilerProcess { timeout: Duration::from_millis(400), ..busy };
        match busy.compile(AsyncModel::Sync, b"").await {
            Err(CompileError::Invalid(why)) => assert!(why.contains("longer than 400ms"), "{why}"),
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn only_a_host_can_start_a_worker() {
        assert!(Job::parse(&["sync", "65536", "1", "1000000"]).is_some());
        for args in [&[][..], &["hello.wasm"], &["sync", "1", "1", "x"], &["other", "1", "1", "1"]] {
            assert!(Job::parse(args).is_none(), "{args:?}");
        }
    }
}
