//! Settings of the Slurm cluster that runs containers of pods as batch jobs.

use std::path::{Path, PathBuf};

use anyhow::Context as _;
use clap::Args;
use mayfly_runtime_slurm::{commands::SlurmClient, script::SubmitDefaults};
use serde::Deserialize;

/// Variables of this process that Slurm's commands need; all others, including credentials, are not passed on, since
/// batch jobs inherit the environment of `sbatch`.
const VARIABLES: [&str; 6] = ["PATH", "HOME", "USER", "LOGNAME", "LANG", "SLURM_CONF"];
/// The search path for commands if this process has no `PATH`.
const PATH_DEFAULT: &str = "/usr/local/bin:/usr/bin:/bin";

/// Flags of `mayfly up` for Slurm.
#[derive(Args, Clone, Debug, Default)]
pub(crate) struct SlurmOptions {
    /// Run pods with runtimeClassName slurm as batch jobs of the Slurm cluster that sbatch on this machine submits to
    #[arg(long, env = "MAYFLY_SLURM")]
    slurm: bool,
    /// The partition of these jobs [default: Slurm's]
    #[arg(long, env = "MAYFLY_SLURM_PARTITION", value_name = "NAME")]
    slurm_partition: Option<String>,
    /// The account that these jobs are charged to [default: Slurm's]
    #[arg(long, env = "MAYFLY_SLURM_ACCOUNT", value_name = "NAME")]
    slurm_account: Option<String>,
    /// A further option of sbatch for these jobs, such as --slurm-option=--exclusive; may be given several times
    #[arg(
        long,
        env = "MAYFLY_SLURM_OPTION",
        value_name = "OPTION",
        value_delimiter = ' ',
        allow_hyphen_values = true
    )]
    slurm_option: Vec<String>,
    /// A directory that the machines of the cluster share under the same path: scripts, outputs and files of these jobs
    /// [default: slurm in the data directory]
    #[arg(long, env = "MAYFLY_SLURM_DIR", value_name = "DIR")]
    slurm_dir: Option<PathBuf>,
}

/// The same settings in the config file.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields, default)]
pub(crate) struct SlurmFile {
    enabled: bool,
    partition: Option<String>,
    account: Option<String>,
    options: Vec<String>,
    dir: Option<PathBuf>,
}

/// The parsed settings.
#[derive(Clone, Debug)]
pub(crate) struct SlurmSettings {
    pub(crate) defaults: SubmitDefaults,
    pub(crate) client: SlurmClient,
    shared: Option<PathBuf>,
}

impl SlurmOptions {
    /// `None`: no cluster is used. `environment` reads a variable of this process.
    pub(crate) fn resolve(
        self,
        file: SlurmFile,
        environment: &dyn Fn(&str) -> Option<String>,
    ) -> anyhow::Result<Option<SlurmSettings>> {
        if !self.slurm && !file.enabled {
            return Ok(None);
        }
        let extra = if self.slurm_option.is_empty() { file.options } else { self.slurm_option };
        if let Some(wrong) = extra.iter().find(|option| !option.starts_with('-')) {
            anyhow::bail!(
                "--slurm-option {wrong}: expected an option of sbatch with its value in one word, such as --qos=high"
            );
        }
        let variables = VARIABLES.iter().filter_map(|name| Some(((*name).to_owned(), environment(name)?)));
        let mut variables: Vec<(String, String)> = variables.collect();
        if variables.iter().all(|(name, _)| name != "PATH") {
            variables.push(("PATH".into(), PATH_DEFAULT.into()));
        }
        Ok(Some(SlurmSettings {
            defaults: SubmitDefaults {
                partition: self.slurm_partition.or(file.partition),
                account: self.slurm_account.or(file.account),
                extra,
            },
            client: SlurmClient { folder: None, environment: variables },
            shared: self.slurm_dir.or(file.dir),
        }))
    }
}

impl SlurmSettings {
    /// The absolute path of the directory that the machines of the cluster share.
    pub(crate) fn shared(&self, default: &Path) -> anyhow::Result<PathBuf> {
        let folder = self.shared.as_deref().unwrap_or(default);
        std::path::absolute(folder).context("the path of --slurm-dir")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn environment(name: &str) -> Option<String> {
        ["HOME", "SLURM_CONF", "AWS_SECRET_ACCESS_KEY"].contains(&name).then(|| format!("{name}'s"))
    }

    #[test]
    fn flags_win_over_the_file_and_secrets_stay_here() {
        assert!(SlurmOptions::default().resolve(SlurmFile::default(), &environment).unwrap().is_none());
        let file: SlurmFile = toml::from_str(
            "enabled = true\npartition = \"a\"\naccount = \"b\"\noptions = [\"--exclusive\"]\ndir = \"/nfs\"",
        )
        .unwrap();
        let options = SlurmOptions { slurm_partition: Some("c".into()), ..Default::default() };
        let settings = options.resolve(file, &environment).unwrap().unwrap();
        assert_eq!(settings.defaults.partition.as_deref(), Some("c"));
        assert_eq!(settings.defaults.account.as_deref(), Some("b"));
        assert_eq!(settings.defaults.extra, ["--exclusive"]);
        assert_eq!(settings.shared(Path::new("/data/slurm")).unwrap(), Path::new("/nfs"));
        let variables: Vec<_> = settings.client.environment.iter().map(|(name, _)| name.as_str()).collect();
        assert_eq!(variables, ["HOME", "SLURM_CONF", "PATH"]);
    }

    #[test]
    fn a_script_is_no_option() {
        let options =
            SlurmOptions { slurm: true, slurm_option: vec!["x.sh".into()], ..SlurmOptions::default() };
        let error = options.resolve(SlurmFile::default(), &environment).unwrap_err().to_string();
        assert!(error.contains("--slurm-option x.sh"), "{error}");
    }
}
