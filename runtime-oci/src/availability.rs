//! Decides whether this machine can run containers, and gives the reason if not.

use std::{
    env,
    path::{Path, PathBuf},
};

/// `--containers`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum ContainersMode {
    /// Run containers if the machine can.
    #[default]
    Auto,
    /// Fail to start if the machine cannot.
    On,
    /// Do not run containers.
    Off,
}

impl std::str::FromStr for ContainersMode {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text {
            "auto" => Ok(Self::Auto),
            "on" => Ok(Self::On),
            "off" => Ok(Self::Off),
            other => Err(format!("{other:?} is not one of auto, on and off")),
        }
    }
}

/// The programs that run containers on this machine.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Programs {
    /// The containerd that Mayfly starts with a private root directory.
    pub containerd: PathBuf,
    /// The folder of the CNI plugins.
    pub cni: PathBuf,
}

/// Whether containers can run on this machine.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Availability {
    /// Containers can run, with these programs.
    Enabled(Programs),
    /// Containers cannot run; the reason.
    Disabled(String),
}

/// The folders in which distributions install CNI plugins.
const CNI_FOLDERS: [&str; 4] =
    ["/usr/lib/cni", "/opt/cni/bin", "/usr/libexec/cni", "/usr/lib/x86_64-linux-gnu/cni"];
/// The plugins that a pod's network needs.
const CNI_PLUGINS: [&str; 4] = ["bridge", "host-local", "loopback", "portmap"];
/// The programs that a container needs in addition to containerd.
const PROGRAMS: [&str; 4] = ["containerd-shim-runc-v2", "runc", "iptables", "ip"];

/// The relevant facts of a machine.
struct MachineFacts<'a> {
    is_root: bool,
    program: &'a dyn Fn(&str) -> Option<PathBuf>,
    cni_folder: Option<PathBuf>,
}

/// Inspects this machine. Blocks.
///
/// # Errors
/// The mode is [`ContainersMode::On`] and containers cannot run; the text says why.
pub fn choose(mode: ContainersMode) -> Result<Availability, String> {
    let program = |name: &str| find_program(name);
    let cni_folder = CNI_FOLDERS.iter().map(PathBuf::from).find(|folder| has_plugins(folder));
    decide(mode, &MachineFacts { is_root: is_root(), program: &program, cni_folder })
}

/// Whether this process may create namespaces and mounts.
pub fn is_root() -> bool {
    rustix::process::geteuid().is_root()
}

fn decide(mode: ContainersMode, machine: &MachineFacts<'_>) -> Result<Availability, String> {
    if mode == ContainersMode::Off {
        return Ok(Availability::Disabled("--containers off".into()));
    }
    let found = inspect(machine);
    match (mode, found) {
        (_, Ok(programs)) => Ok(Availability::Enabled(programs)),
        (ContainersMode::On, Err(reason)) => Err(reason),
        (_, Err(reason)) => Ok(Availability::Disabled(reason)),
    }
}

fn inspect(machine: &MachineFacts<'_>) -> Result<Programs, String> {
    if !machine.is_root {
        return Err("containers need root".into());
    }
    let containerd = (machine.program)("containerd").ok_or("the program containerd is not installed")?;
    for name in PROGRAMS {
        (machine.program)(name).ok_or_else(|| format!("the program {name} is not installed"))?;
    }
    let cni = machine.cni_folder.clone().ok_or_else(|| {
        format!(
            "the CNI plugins {} are not installed in {}",
            CNI_PLUGINS.join(", "),
            CNI_FOLDERS.join(" or ")
        )
    })?;
    Ok(Programs { containerd, cni })
}

fn has_plugins(folder: &Path) -> bool {
    CNI_PLUGINS.iter().all(|plugin| folder.join(plugin).is_file())
}

/// The path of a program: on the PATH, or in `/usr/sbin` and `/sbin`.
pub fn find_program(name: &str) -> Option<PathBuf> {
    let path = env::var_os("PATH").unwrap_or_default();
    // The PATH of a service may lack these directories.
    let folders = env::split_paths(&path).chain(["/usr/sbin", "/sbin"].map(PathBuf::from));
    folders.map(|folder| folder.join(name)).find(|file| file.is_file())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn containers_are_enabled_when_all_prerequisites_exist() {
        let all = |name: &str| Some(PathBuf::from("/usr/bin").join(name));
        let none = |_: &str| None;
        let no_runc = |name: &str| if name == "runc" { None } else { all(name) };
        let cni = || Some(PathBuf::from("/cni"));
        let programs = Programs { containerd: "/usr/bin/containerd".into(), cni: "/cni".into() };
        let machine = MachineFacts { is_root: true, program: &all, cni_folder: cni() };
        assert_eq!(decide(ContainersMode::Auto, &machine), Ok(Availability::Enabled(programs.clone())));
        assert_eq!(decide(ContainersMode::On, &machine), Ok(Availability::Enabled(programs)));
        assert!(matches!(decide(ContainersMode::Off, &machine), Ok(Availability::Disabled(_))));
        for (is_root, program, cni_folder, reason) in [
            (false, &all as &dyn Fn(&str) -> Option<PathBuf>, cni(), "root"),
            (true, &none, cni(), "containerd is not installed"),
            (true, &no_runc, cni(), "runc is not installed"),
            (true, &all, None, "CNI plugins"),
        ] {
            let machine = MachineFacts { is_root, program, cni_folder };
            assert!(decide(ContainersMode::On, &machine).unwrap_err().contains(reason), "{reason}");
            let Ok(Availability::Disabled(said)) = decide(ContainersMode::Auto, &machine) else {
                panic!("{reason}")
            };
            assert!(said.contains(reason), "{said}");
        }
    }
}
