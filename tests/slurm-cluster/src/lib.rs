//! A private Slurm cluster of one node, for tests: `munged`, `slurmctld` and `slurmd` from the machine's packages, with
//! a configuration, ports, keys and folders of their own.
//!
//! **Belongs here:** the start and the stop of these processes, and their configuration.
//!
//! **Does not belong here:** anything that depends on Mayfly.
//!
//! Needs root, because `slurmd` does. Start reading at [`SlurmCluster::start`].

#![warn(missing_debug_implementations)]

use std::{
    fs,
    io::Read as _,
    net::TcpListener,
    os::unix::fs::PermissionsExt as _,
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    thread,
    time::{Duration, Instant},
};

use rustix::process::{Pid, Signal, kill_process};
use tempfile::TempDir;

/// The timeout for the daemons' first answers.
const START_DEADLINE: Duration = Duration::from_secs(60);
const STOP_DEADLINE: Duration = Duration::from_secs(10);
const LOOK_EVERY: Duration = Duration::from_millis(50);
/// The number of cores and the memory, in MiB, of the node. Slurm is configured not to verify them.
const CPUS: u32 = 4;
const MEMORY_MIB: u32 = 2000;
const MUNGE_KEY_BYTES: usize = 128;
/// The folders in which Debian installs daemons.
const FOLDERS: [&str; 4] = ["/usr/sbin", "/usr/bin", "/sbin", "/bin"];

/// The running cluster. Its processes end when it is dropped.
#[derive(Debug)]
pub struct SlurmCluster {
    folder: TempDir,
    munged: Option<Child>,
    slurmctld: Option<Child>,
    slurmd: Option<Child>,
}

impl SlurmCluster {
    /// Starts a cluster with the partitions `main` (the default) and `short` (jobs of at most a minute).
    ///
    /// # Errors
    /// The reason why this machine cannot run a cluster.
    ///
    /// # Panics
    /// If everything is installed, but the cluster does not start.
    pub fn start() -> Result<Self, String> {
        if !rustix::process::geteuid().is_root() {
            return Err("not root, which slurmd needs".into());
        }
        for program in ["munged", "slurmctld", "slurmd", "sbatch"] {
            if find(program).is_none() {
                return Err(format!("no {program} (Debian: slurm-wlm)"));
            }
        }
        let folder = tempfile::Builder::new().prefix("mayfly-slurm-").tempdir().expect("a temporary folder");
        // munged rejects a folder that others can write to, and clients must be able to enter it.
        fs::set_permissions(folder.path(), fs::Permissions::from_mode(0o755)).expect("the folder's mode");
        let mut cluster = Self { folder, munged: None, slurmctld: None, slurmd: None };
        cluster.write_configuration();
        cluster.munged = Some(cluster.spawn_munged());
        cluster.start_controller();
        cluster.slurmd = Some(cluster.spawn("slurmd", &["-D"]));
        cluster.wait_until("its node is idle", || {
            cluster.run("sinfo", &["--noheader", "--format=%T"]).contains("idle")
        });
        Ok(cluster)
    }

    /// The configuration: the value of `SLURM_CONF` for Slurm's commands.
    pub fn configuration(&self) -> PathBuf {
        self.path("slurm.conf")
    }

    /// A folder that is shared with the node of the cluster.
    pub fn shared(&self) -> PathBuf {
        self.path("shared")
    }

    /// Runs a command of Slurm, and returns its stdout.
    ///
    /// # Panics
    /// The command cannot be run.
    pub fn run(&self, command: &str, arguments: &[&str]) -> String {
        let mut process = Command::new(command);
        process.args(arguments).env("SLURM_CONF", self.configuration()).stdin(Stdio::null());
        let ran = process.output().expect("a command of Slurm");
        String::from_utf8_lossy(&ran.stdout).into_owned()
    }

    /// The names of all jobs that the controller knows, ended ones included, one for each submission.
    pub fn job_names(&self) -> Vec<String> {
        let names = self.run("squeue", &["--all", "--states=all", "--noheader", "--format=%j"]);
        names.lines().map(str::to_owned).collect()
    }

    /// Stops the controller; its state stays on disk.
    pub fn stop_controller(&mut self) {
        stop(&mut self.slurmctld);
    }

    /// Starts the controller, and waits until it answers.
    ///
    /// # Panics
    /// It does not answer in time.
    pub fn start_controller(&mut self) {
        self.slurmctld = Some(self.spawn("slurmctld", &["-D"]));
        self.wait_until("its controller answers", || self.run("scontrol", &["ping"]).contains("UP"));
    }

    fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    fn write_configuration(&self) {
        for name in ["state", "spool", "run", "shared"] {
            fs::create_dir(self.path(name)).expect("a folder of the cluster");
        }
        let mut key = [0; MUNGE_KEY_BYTES];
        fs::File::open("/dev/urandom").and_then(|mut file| file.read_exact(&mut key)).expect("random bytes");
        fs::write(self.path("munge.key"), key).expect("the key");
        fs::set_permissions(self.path("munge.key"), fs::Permissions::from_mode(0o400))
            .expect("the key's mode");
        let host = rustix::system::uname().nodename().to_string_lossy().into_owned();
        let host = host.split('.').next().unwrap_or_default();
        let [controller, node] = free_ports();
        let folder = self.folder.path().display();
        let configuration = format!(
            "ClusterName=mayfly-test\n\
             SlurmctldHost={host}(127.0.0.1)\n\
             SlurmUser=root\n\
             SlurmdUser=root\n\
             AuthType=auth/munge\n\
             AuthInfo=socket={folder}/run/munge.socket\n\
             CredType=cred/munge\n\
             SlurmctldPort={controller}\n\
             SlurmdPort={node}\n\
             StateSaveLocation={folder}/state\n\
             SlurmdSpoolDir={folder}/spool\n\
             SlurmctldPidFile={folder}/run/slurmctld.pid\n\
             SlurmdPidFile={folder}/run/slurmd.pid\n\
             SlurmdParameters=config_overrides\n\
             ProctrackType=proctrack/linuxproc\n\
             TaskPlugin=task/none\n\
             SelectType=select/cons_tres\n\
             SelectTypeParameters=CR_Core_Memory\n\
             JobAcctGatherType=jobacct_gather/linux\n\
             JobAcctGatherFrequency=1\n\
             JobAcctGatherParams=OverMemoryKill\n\
             AccountingStorageType=accounting_storage/none\n\
             SwitchType=switch/none\n\
             MpiDefault=none\n\
             ReturnToService=2\n\
             MessageTimeout=5\n\
             KillWait=2\n\
             EnforcePartLimits=ALL\n\
             SchedulerParameters=sched_interval=1,bf_interval=1\n\
             NodeName={host} NodeAddr=127.0.0.1 Port={node} CPUs={CPUS} RealMemory={MEMORY_MIB} State=UNKNOWN\n\
             PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE State=UP\n\
             PartitionName=short Nodes=ALL MaxTime=1 State=UP\n"
        );
        fs::write(self.configuration(), configuration).expect("the configuration");
    }

    fn spawn_munged(&self) -> Child {
        let option = |name: &str, file: &str| format!("--{name}={}", self.path(file).display());
        let options = [
            "--foreground".to_owned(),
            // A parent of the temporary folder may be writable by others.
            "--force".to_owned(),
            option("socket", "run/munge.socket"),
            option("key-file", "munge.key"),
            option("pid-file", "run/munged.pid"),
            option("log-file", "munged.log"),
            option("seed-file", "munge.seed"),
            "--num-threads=2".to_owned(),
        ];
        let munged = self.spawn("munged", &options.iter().map(String::as_str).collect::<Vec<_>>());
        let socket = self.path("run/munge.socket");
        self.wait_until("munged listens", || socket.exists());
        munged
    }

    /// Starts a daemon in the foreground; its messages go to a file.
    fn spawn(&self, program: &str, arguments: &[&str]) -> Child {
        let messages =
            fs::File::options().create(true).append(true).open(self.path(&format!("{program}.out")));
        let messages = messages.expect("a file for messages");
        let errors = messages.try_clone().expect("a second handle");
        let mut process = Command::new(find(program).expect("it was found before"));
        process
            .args(arguments)
            .env("SLURM_CONF", self.configuration())
            .current_dir(self.folder.path())
            .stdin(Stdio::null())
            .stdout(messages)
            .stderr(errors);
        process.spawn().expect("a daemon of the cluster")
    }

    fn wait_until(&self, what: &str, mut holds: impl FnMut() -> bool) {
        let started = Instant::now();
        while !holds() {
            if started.elapsed() >= START_DEADLINE {
                let messages = |name: &str| fs::read_to_string(self.path(name)).unwrap_or_default();
                panic!(
                    "the Slurm cluster: waited in vain until {what}\nmunged: {}\nslurmctld: {}\nslurmd: {}",
                    messages("munged.out"),
                    messages("slurmctld.out"),
                    messages("slurmd.out")
                );
            }
            thread::sleep(LOOK_EVERY);
        }
    }
}

impl Drop for SlurmCluster {
    fn drop(&mut self) {
        // Jobs are children of slurmd's steps, not of this process.
        if self.slurmctld.is_some() && self.slurmd.is_some() {
            self.run("scancel", &["--full", "--signal=KILL", "--user=root"]);
            let started = Instant::now();
            while started.elapsed() < STOP_DEADLINE
                && !self.run("squeue", &["--all", "--noheader", "--format=%A"]).trim().is_empty()
            {
                thread::sleep(LOOK_EVERY);
            }
        }
        for daemon in [&mut self.slurmd, &mut self.slurmctld, &mut self.munged] {
            stop(daemon);
        }
    }
}

/// Stops a daemon: with SIGTERM, and with SIGKILL if it does not end.
fn stop(daemon: &mut Option<Child>) {
    let Some(mut daemon) = daemon.take() else { return };
    if let Some(id) = i32::try_from(daemon.id()).ok().and_then(Pid::from_raw) {
        // It may have ended by itself.
        let _ = kill_process(id, Signal::TERM);
    }
    let started = Instant::now();
    while started.elapsed() < STOP_DEADLINE {
        if matches!(daemon.try_wait(), Ok(Some(_)) | Err(_)) {
            return;
        }
        thread::sleep(LOOK_EVERY);
    }
    let _ = daemon.kill();
    let _ = daemon.wait();
}

fn find(program: &str) -> Option<PathBuf> {
    FOLDERS.iter().map(|folder| Path::new(folder).join(program)).find(|path| path.exists())
}

/// Unused ports of this machine.
fn free_ports() -> [u16; 2] {
    let listeners = [(); 2].map(|()| TcpListener::bind("127.0.0.1:0").expect("a free port"));
    listeners.map(|listener| listener.local_addr().expect("its address").port())
}
