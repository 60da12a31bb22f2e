use std::process::{Command, Stdio};

use mayfly_runtime::{ContainerFiles, Mount, PodUid, ProcessOptions};

use super::*;

fn pod() -> ObjectKey {
    ObjectKey::new("default", "sim")
}

fn container(command: &[&str]) -> ContainerSpec {
    ContainerSpec {
        id: ContainerId { pod: PodUid("u1".into()), name: "main".into(), attempt: 2 },
        image: "none".into(),
        command: command.iter().map(|word| (*word).to_owned()).collect(),
        args: Vec::new(),
        env: Vec::new(),
        memory_bytes_max: None,
        cpu_millis_max: None,
        ports: Vec::new(),
        log_path: "/log".into(),
        files: None,
        process: ProcessOptions::default(),
    }
}

fn arguments(
    container: &ContainerSpec,
    annotations: &[(&str, &str)],
    defaults: &SubmitDefaults,
) -> Vec<String> {
    let annotations = annotations.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned()));
    submit_arguments(container, &pod(), &annotations.collect(), Path::new("/shared/50%/c"), defaults)
}

#[test]
fn a_container_without_limits_gets_one_core() {
    assert_eq!(
        arguments(&container(&["true"]), &[], &SubmitDefaults::default()),
        [
            "--parsable",
            "--job-name=mayfly-u1_main_2",
            "--comment=default/sim main",
            "--chdir=/shared/50%/c",
            "--output=/shared/50%%/c/stdout",
            "--error=/shared/50%%/c/stderr",
            "--open-mode=append",
            "--no-requeue",
            "--nodes=1",
            "--ntasks=1",
            "--cpus-per-task=1",
            "/shared/50%/c/script",
        ]
    );
}

#[test]
fn resources_become_options() {
    let mut one = container(&["true"]);
    one.cpu_millis_max = Some(2500);
    one.memory_bytes_max = Some((1 << 20) + 1);
    one.process.cpu_millis_request = 1000;
    one.process.memory_bytes_request = 1 << 10;
    one.process.extended_resources = [(RESOURCE_GPU.into(), 2)].into();
    one.process.active_deadline = Some(Duration::from_secs(61));
    let options = arguments(&one, &[], &SubmitDefaults::default());
    for expected in ["--cpus-per-task=3", "--mem=1025K", "--gres=gpu:2", "--time=2"] {
        assert!(options.iter().any(|option| option == expected), "{expected} in {options:?}");
    }
    let mut requests = container(&["true"]);
    requests.process.cpu_millis_request = 4000;
    requests.process.memory_bytes_request = 4 << 20;
    let options = arguments(&requests, &[], &SubmitDefaults::default());
    for expected in ["--cpus-per-task=4", "--mem=4096K"] {
        assert!(options.iter().any(|option| option == expected), "{expected} in {options:?}");
    }
}

#[test]
fn annotations_follow_the_defaults_so_that_they_win() {
    let defaults = SubmitDefaults {
        partition: Some("batch".into()),
        account: Some("physics".into()),
        extra: vec!["--exclusive".into()],
    };
    let annotations =
        [("slurm.mayfly.dev/partition", "gpu"), ("slurm.mayfly.dev/qos", "high"), ("other", "x")];
    let options = arguments(&container(&["true"]), &annotations, &defaults);
    assert_eq!(
        options[1..6],
        ["--partition=batch", "--account=physics", "--exclusive", "--partition=gpu", "--qos=high"]
    );
}

#[test]
fn a_container_without_a_program_is_refused() {
    let refused = batch_script(&container(&[]), &pod(), Path::new("/c")).unwrap_err();
    assert!(refused.contains("set command or args"), "{refused}");
}

/// Runs a container's script as Slurm does. Returns its exit code, stdout and stderr.
fn run(container: &ContainerSpec, folder: &Path, job: &str) -> (i32, String, String) {
    std::fs::create_dir_all(folder.join(FOLDER_WORK)).unwrap();
    let script = folder.join(FILE_SCRIPT);
    std::fs::write(&script, batch_script(container, &pod(), folder).unwrap()).unwrap();
    let ran =
        Command::new("bash").arg(&script).env("SLURM_JOB_ID", job).stdin(Stdio::null()).output().unwrap();
    let text = |bytes| String::from_utf8(bytes).unwrap();
    (ran.status.code().unwrap(), text(ran.stdout), text(ran.stderr))
}

#[test]
fn words_and_variables_arrive_as_they_are() {
    let folder = tempfile::tempdir().unwrap();
    let awkward = "it's $HOME `x` \"q\" \\ *\nline two";
    let mut one = container(&["bash", "-c", r#"printf '%s|' "$@" "$PLAIN"; printenv odd.name"#, "sh"]);
    one.args = vec![awkward.into(), "-n".into()];
    one.env = vec![("PLAIN".into(), awkward.into()), ("odd.name".into(), "v a".into())];
    let (code, stdout, stderr) = run(&one, folder.path(), "1");
    assert_eq!((code, stderr.as_str()), (0, ""));
    assert_eq!(stdout, format!("{awkward}|-n|{awkward}|v a\n"));
    assert_eq!(std::fs::read_to_string(folder.path().join(FILE_EXIT)).unwrap(), "0\n");
    assert_eq!(std::fs::read_to_string(folder.path().join(FILE_CLAIM)).unwrap(), "1\n");
}

#[test]
fn a_second_job_of_a_container_does_not_run_the_program() {
    let folder = tempfile::tempdir().unwrap();
    let one = container(&["sh", "-c", "echo ran; exit 3"]);
    assert_eq!(run(&one, folder.path(), "10"), (3, "ran\n".into(), String::new()));
    let (code, stdout, stderr) = run(&one, folder.path(), "11");
    assert_eq!((code, stdout.as_str()), (EXIT_NOT_RUN, ""));
    assert!(stderr.contains("already"), "{stderr}");
    assert_eq!(std::fs::read_to_string(folder.path().join(FILE_EXIT)).unwrap(), "3\n");
    // The same job, requeued after a restart of its machine.
    assert_eq!(run(&one, folder.path(), "10").0, 3);
}

#[test]
fn files_of_a_job_are_named_by_variables_and_stdin_is_its_file() {
    let folder = tempfile::tempdir().unwrap();
    let stdin = folder.path().join("in put");
    std::fs::write(&stdin, "{}").unwrap();
    let mount =
        |host: &str, guest: &str| Mount { host: host.into(), guest: guest.into(), ..Mount::default() };
    let mut one = container(&["sh", "-c", "cat; echo \" $MAYFLY_IN $MAYFLY_OUT\"; pwd"]);
    one.files = Some(ContainerFiles {
        mounts: vec![mount("/jobs/i", job_io::FOLDER_IN), mount("/jobs/o", job_io::FOLDER_OUT)],
        stdin,
        capture: "/jobs/c".into(),
    });
    one.process.working_dir = Some("/".into());
    assert_eq!(run(&one, folder.path(), "1"), (0, "{} /jobs/i /jobs/o\n/\n".into(), String::new()));
}

#[test]
fn a_program_that_is_missing_has_the_exit_code_of_a_shell() {
    let folder = tempfile::tempdir().unwrap();
    assert_eq!(run(&container(&["no-such-program-here"]), folder.path(), "1").0, 127);
    let folder = tempfile::tempdir().unwrap();
    let mut one = container(&["true"]);
    one.process.working_dir = Some("/no/such/folder".into());
    assert_eq!(run(&one, folder.path(), "1").0, EXIT_NOT_RUN);
}
