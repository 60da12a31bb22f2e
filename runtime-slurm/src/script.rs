//! The batch script of a container, and the options of its submission; pure functions.

use std::{collections::BTreeMap, path::Path, time::Duration};

use mayfly_api::{ObjectKey, job_io};
use mayfly_runtime::{ContainerId, ContainerSpec};

/// Annotations of a pod, with the option of `sbatch` that each sets.
pub const ANNOTATIONS: [(&str, &str); 5] = [
    ("slurm.mayfly.dev/partition", "partition"),
    ("slurm.mayfly.dev/account", "account"),
    ("slurm.mayfly.dev/qos", "qos"),
    ("slurm.mayfly.dev/constraint", "constraint"),
    ("slurm.mayfly.dev/reservation", "reservation"),
];
/// The environment variables with the directories of a job's inputs and outputs, for containers with either.
pub const VARIABLE_IN: &str = "MAYFLY_IN";
pub const VARIABLE_OUT: &str = "MAYFLY_OUT";
/// The Kubernetes resource name of GPUs, and Slurm's GRES name.
pub const RESOURCE_GPU: &str = "nvidia.com/gpu";
const GRES_GPU: &str = "gpu";

/// The exit code of a script that could not start the container's program.
const EXIT_NOT_RUN: i32 = 125;

/// Names of files in a container's directory.
pub const FILE_SCRIPT: &str = "script";
pub const FILE_CLAIM: &str = "claim";
pub const FILE_EXIT: &str = "exit";
pub const FILE_STDOUT: &str = "stdout";
pub const FILE_STDERR: &str = "stderr";
/// The working directory of a program without a `workingDir`.
pub const FOLDER_WORK: &str = "work";

/// Options of all jobs.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct SubmitDefaults {
    /// `None`: Slurm's default.
    pub partition: Option<String>,
    pub account: Option<String>,
    /// Further options of `sbatch`; options of the container override them.
    pub extra: Vec<String>,
}

/// The name of a container's job, which is unique to the container.
pub fn job_name(id: &ContainerId) -> String {
    format!("mayfly-{id}")
}

/// The arguments of `sbatch` for a container with the directory `folder`. `annotations` are the pod's.
pub fn submit_arguments(
    container: &ContainerSpec,
    pod: &ObjectKey,
    annotations: &BTreeMap<String, String>,
    folder: &Path,
    defaults: &SubmitDefaults,
) -> Vec<String> {
    let option = |name: &str, value: &str| format!("--{name}={value}");
    // Slurm expands `%` patterns in the names of these files.
    let file = |name: &str| folder.join(name).to_string_lossy().replace('%', "%%");
    let mut arguments = vec!["--parsable".to_owned()];
    for (name, value) in [("partition", &defaults.partition), ("account", &defaults.account)] {
        arguments.extend(value.as_ref().map(|value| option(name, value)));
    }
    arguments.extend(defaults.extra.iter().cloned());
    for (annotation, name) in ANNOTATIONS {
        arguments.extend(annotations.get(annotation).map(|value| option(name, value)));
    }
    arguments.extend([
        option("job-name", &job_name(&container.id)),
        option("comment", &format!("{pod} {}", container.id.name)),
        option("chdir", &folder.to_string_lossy()),
        option("output", &file(FILE_STDOUT)),
        option("error", &file(FILE_STDERR)),
        // A second job of the container must not truncate the output of the first.
        "--open-mode=append".to_owned(),
        // Reruns are decided by the pod's restart policy or its Job, not by Slurm.
        "--no-requeue".to_owned(),
        "--nodes=1".to_owned(),
        "--ntasks=1".to_owned(),
    ]);
    let cpu_millis = container.cpu_millis_max.unwrap_or(0).max(container.process.cpu_millis_request);
    arguments.push(option("cpus-per-task", &cpu_millis.div_ceil(1000).max(1).to_string()));
    let memory_bytes = container.memory_bytes_max.unwrap_or(0).max(container.process.memory_bytes_request);
    if memory_bytes > 0 {
        arguments.push(format!("--mem={}K", memory_bytes.div_ceil(1024)));
    }
    if let Some(count) = container.process.extended_resources.get(RESOURCE_GPU) {
        arguments.push(format!("--gres={GRES_GPU}:{count}"));
    }
    if let Some(limit) = container.process.active_deadline {
        arguments.push(format!("--time={}", minutes(limit)));
    }
    arguments.push(folder.join(FILE_SCRIPT).to_string_lossy().into_owned());
    arguments
}

/// A time limit in Slurm's unit, whole minutes.
fn minutes(limit: Duration) -> u64 {
    limit.as_secs().div_ceil(60).max(1)
}

/// The batch script: claims the run, starts the program, and writes its exit code.
///
/// The script ignores the signals for the program, so that it can write the program's exit code.
///
/// # Errors
/// The container has no command; the text is for users.
pub fn batch_script(container: &ContainerSpec, pod: &ObjectKey, folder: &Path) -> Result<String, String> {
    let program: Vec<&String> = container.command.iter().chain(&container.args).collect();
    if program.is_empty() {
        return Err(format!(
            "container {}: a Slurm job does not use an image: set command or args",
            container.id.name
        ));
    }
    let mut variables: Vec<(&str, String)> = Vec::new();
    let mut stdin = "/dev/null".to_owned();
    if let Some(files) = &container.files {
        stdin = files.stdin.to_string_lossy().into_owned();
        for mount in &files.mounts {
            let name = match mount.guest.as_str() {
                job_io::FOLDER_IN => VARIABLE_IN,
                job_io::FOLDER_OUT => VARIABLE_OUT,
                _ => continue,
            };
            variables.push((name, mount.host.to_string_lossy().into_owned()));
        }
    }
    variables.extend(container.env.iter().map(|(name, value)| (name.as_str(), value.clone())));
    let (exported, others): (Vec<_>, Vec<_>) =
        variables.into_iter().partition(|(name, _)| is_shell_name(name));
    let exports: String =
        exported.iter().map(|(name, value)| format!("  export {name}={}\n", quoted(value))).collect();
    // These are not valid names of shell variables.
    let others = others.iter().map(|(name, value)| format!("{} ", quoted(&format!("{name}={value}"))));
    let others: String = others.collect();
    let env = if others.is_empty() { String::new() } else { format!("env {others}") };
    let program: Vec<_> = program.into_iter().map(|word| quoted(word)).collect();
    let program = program.join(" ");
    let folder_text = quoted(&folder.to_string_lossy());
    let work = match container.process.working_dir.as_deref().filter(|work| !work.is_empty()) {
        Some(work) => quoted(work),
        None => quoted(&folder.join(FOLDER_WORK).to_string_lossy()),
    };
    let stdin = quoted(&stdin);
    Ok(format!(
        "#!/bin/bash\n\
         # Pod {pod}, container {name}; written by Mayfly.\n\
         cd -- {folder_text} || exit {EXIT_NOT_RUN}\n\
         if ! (set -o noclobber; echo \"$SLURM_JOB_ID\" >{FILE_CLAIM}) 2>/dev/null &&\n\
         \x20 [ \"$(cat {FILE_CLAIM})\" != \"$SLURM_JOB_ID\" ]\n\
         then\n\
         \x20 echo \"another job has run this container already\" >&2\n\
         \x20 exit {EXIT_NOT_RUN}\n\
         fi\n\
         trap : HUP INT QUIT TERM USR1 USR2\n\
         (\n\
         \x20 cd -- {work} || exit {EXIT_NOT_RUN}\n\
         {exports}\
         \x20 exec {env}{program} <{stdin}\n\
         )\n\
         code=$?\n\
         echo \"$code\" >{FILE_EXIT}.new && mv {FILE_EXIT}.new {FILE_EXIT}\n\
         exit \"$code\"\n",
        name = container.id.name,
    ))
}

/// Whether this is a valid name of a shell variable.
fn is_shell_name(name: &str) -> bool {
    let is_start = |letter: char| letter.is_ascii_alphabetic() || letter == '_';
    name.starts_with(is_start) && name.chars().all(|letter| is_start(letter) || letter.is_ascii_digit())
}

/// Quotes a text as one word of the shell.
fn quoted(text: &str) -> String {
    format!("'{}'", text.replace('\'', r"'\''"))
}

#[cfg(test)]
mod tests;
