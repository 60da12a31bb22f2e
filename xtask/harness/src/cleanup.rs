//! Cleanup of a task's processes and folders, however it ends.

use std::{
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::{Duration, Instant},
};

use anyhow::{Context, Result};
use signal_hook::{
    consts::{SIGHUP, SIGINT, SIGTERM},
    iterator::Signals,
};

/// The time that a process has to stop before it is killed.
const STOP_TIMEOUT: Duration = Duration::from_secs(15);
/// The interval of the checks of a stopping process.
const STOP_POLL: Duration = Duration::from_millis(10);

/// Owns processes and folders; on drop, Ctrl-C or SIGTERM, stops the processes and removes the folders.
#[derive(Debug)]
pub struct Cleanup {
    things: Arc<Mutex<Things>>,
}

#[derive(Debug, Default)]
struct Things {
    /// Run before the processes are stopped, if any of them still runs.
    commands: Vec<Command>,
    children: Vec<Child>,
    folders: Vec<PathBuf>,
}

impl Cleanup {
    /// At most one may exist in a process.
    pub fn new() -> Result<Self> {
        let things = Arc::new(Mutex::new(Things::default()));
        let mut signals = Signals::new([SIGINT, SIGTERM, SIGHUP]).context("cannot listen for signals")?;
        let on_signal = things.clone();
        std::thread::spawn(move || {
            if let Some(signal) = signals.forever().next() {
                eprintln!("\ninterrupted: stopping all started processes");
                lock(&on_signal).clear();
                std::process::exit(128 + signal);
            }
        });
        Ok(Self { things })
    }

    /// Creates a folder below the system's temporary folder.
    pub fn temporary_folder(&self, name: &str) -> Result<PathBuf> {
        let mut things = lock(&self.things);
        let folder = std::env::temp_dir().join(format!(
            "mayfly-{name}-{}-{}",
            std::process::id(),
            things.folders.len()
        ));
        std::fs::create_dir_all(&folder).with_context(|| format!("cannot make {}", folder.display()))?;
        things.folders.push(folder.clone());
        Ok(folder)
    }

    /// Registers a command to run before the processes are stopped, for anything that outlives a process, such as a
    /// server's containers.
    pub fn run_before_stop(&self, command: Command) {
        lock(&self.things).commands.push(command);
    }

    /// Starts a process with an empty stdin; returns its id.
    pub fn spawn(&self, command: &mut Command) -> Result<u32> {
        let mut things = lock(&self.things);
        let child = command
            .stdin(Stdio::null())
            .spawn()
            .with_context(|| format!("cannot start {}", command.get_program().display()))?;
        let id = child.id();
        things.children.push(child);
        Ok(id)
    }

    /// The exit status of a process started here, if it has ended.
    pub fn ended(&self, id: u32) -> Option<String> {
        let mut things = lock(&self.things);
        let child = things.children.iter_mut().find(|child| child.id() == id)?;
        child.try_wait().ok().flatten().map(|status| status.to_string())
    }

    /// Stops a process started here: with SIGTERM, then with SIGKILL.
    pub fn stop(&self, id: u32) {
        let child = {
            let mut things = lock(&self.things);
            let at = things.children.iter().position(|child| child.id() == id);
            at.map(|at| things.children.swap_remove(at))
        };
        if let Some(child) = child {
            stop(vec![child]);
        }
    }

    /// Removes a folder created here at once.
    pub fn remove(&self, folder: &Path) {
        let mut things = lock(&self.things);
        things.folders.retain(|one| one != folder);
        let _ = std::fs::remove_dir_all(folder);
    }
}

impl Drop for Cleanup {
    fn drop(&mut self) {
        lock(&self.things).clear();
    }
}

impl Things {
    fn clear(&mut self) {
        for mut command in self.commands.drain(..) {
            let _ = command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null()).status();
        }
        stop(std::mem::take(&mut self.children));
        for folder in self.folders.drain(..) {
            let _ = std::fs::remove_dir_all(folder);
        }
    }
}

/// A panic in another thread must not prevent the cleanup.
fn lock(things: &Mutex<Things>) -> MutexGuard<'_, Things> {
    things.lock().unwrap_or_else(PoisonError::into_inner)
}

fn stop(mut children: Vec<Child>) {
    for child in &mut children {
        if matches!(child.try_wait(), Ok(None)) {
            terminate(child.id());
        }
    }
    let deadline = Instant::now() + STOP_TIMEOUT;
    for child in &mut children {
        while matches!(child.try_wait(), Ok(None)) {
            if Instant::now() > deadline {
                eprintln!("process {} did not stop within {STOP_TIMEOUT:?}: killing it", child.id());
                let _ = child.kill();
                let _ = child.wait();
                break;
            }
            std::thread::sleep(STOP_POLL);
        }
    }
}

/// Sends SIGTERM with the command `kill`: the standard library has no function for it.
fn terminate(id: u32) {
    let _ = Command::new("sh").args(["-c", &format!("kill -TERM {id}")]).status();
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn dropping_a_scope_ends_its_processes_and_removes_its_folders() {
        let scope = Cleanup::new().unwrap();
        let folder = scope.temporary_folder("scope-test").unwrap();
        std::fs::write(folder.join("file"), "text").unwrap();
        let id = scope.spawn(Command::new("sleep").arg("1000")).unwrap();
        assert!(scope.ended(id).is_none());
        let started = Instant::now();
        drop(scope);
        assert!(!folder.exists());
        assert!(started.elapsed() < STOP_TIMEOUT, "a polite stop is enough");
        assert!(!Path::new(&format!("/proc/{id}/cmdline")).exists());
    }

    #[test]
    fn a_process_that_exited_early_reports_its_status() {
        let scope = Cleanup::new().unwrap();
        let id = scope.spawn(Command::new("sh").args(["-c", "exit 3"])).unwrap();
        let deadline = Instant::now() + Duration::from_secs(10);
        let how = loop {
            if let Some(how) = scope.ended(id) {
                break how;
            }
            assert!(Instant::now() < deadline, "the shell ends");
            std::thread::yield_now();
        };
        assert!(how.contains('3'), "{how}");
    }
}
