//! Clients from PyPI that tests use (AWS's and Kubernetes'), in a Python environment in the folder of tools.

use std::{
    path::{Path, PathBuf},
    process::Command,
};

use anyhow::{Context, Result};
use mayfly_xtask_harness::{command, tools};

/// Matching versions: boto3 and awscli require the same botocore, and later versions of kubernetes a later
/// python-dateutil than botocore accepts.
const PACKAGES: &[&str] = &["boto3==1.43.11", "awscli==1.45.11", "kubernetes==37.0.1"];

/// The environment's Python and its `aws`.
pub(crate) struct Clients {
    pub(crate) python: PathBuf,
    pub(crate) aws: PathBuf,
}

/// Returns the clients, which are installed at the first use, outside the target directory.
pub(crate) fn install() -> Result<Clients> {
    let folder = tools::folder()?.join("aws-clients");
    let bin = folder.join("bin");
    let clients = Clients { python: bin.join("python"), aws: bin.join("aws") };
    let stamp = folder.join("installed");
    let wanted = PACKAGES.join("\n");
    let there = std::fs::read_to_string(&stamp).is_ok_and(|installed| installed == wanted);
    if there && command::works(&clients.aws, &["--version"]) {
        return Ok(clients);
    }
    println!("installing {} into {}", PACKAGES.join(" "), folder.display());
    // Removes the remains of an interrupted or older installation.
    if folder.exists() {
        std::fs::remove_dir_all(&folder).with_context(|| format!("cannot empty {}", folder.display()))?;
    }
    if command::works("uv", &["--version"]) {
        command::quietly(Command::new("uv").args(["venv", "--quiet"]).arg(&folder))?;
        let mut pip = Command::new("uv");
        pip.args(["pip", "install", "--quiet", "--python"]).arg(&clients.python);
        command::quietly(pip.args(PACKAGES))?;
    } else {
        make_environment(&folder)?;
        let mut pip = Command::new(&clients.python);
        pip.args(["-m", "pip", "install", "--quiet", "--disable-pip-version-check"]);
        command::quietly(pip.args(PACKAGES))?;
    }
    std::fs::write(&stamp, wanted)?;
    Ok(clients)
}

fn make_environment(folder: &Path) -> Result<()> {
    let make = || command::quietly(Command::new("python3").args(["-m", "venv"]).arg(folder));
    let Err(error) = make() else { return Ok(()) };
    if !tools::can_use_apt() {
        return Err(error);
    }
    // Debian's python3 lacks the module that creates environments.
    tools::apt_install(&["python3-venv"])?;
    make()
}
