use super::{values::node_name, *};

fn with_node(node: NodeOptions) -> UpArgs {
    UpArgs { node, ..Default::default() }
}

#[test]
fn a_flag_is_stronger_than_the_file() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("c.toml");
    let text =
        "http-listen = \"127.0.0.1:1\"\nadmin-listen = \":2\"\nnode-name = \"n\"\ntrust-forwarded = true";
    std::fs::write(&file, text).unwrap();
    let distrusting = with_node(NodeOptions {
        trust_forwarded: Some(false),
        config: Some(file.clone()),
        ..Default::default()
    });
    assert!(!distrusting.resolve().unwrap().node.trust_forwarded);
    let args = with_node(NodeOptions {
        http_listen: Some("localhost:0".into()),
        config: Some(file),
        ..Default::default()
    });
    let config = args.resolve().unwrap();
    assert_eq!(config.node.http_listen.to_string(), "127.0.0.1:0");
    assert_eq!(config.node.admin_listen.to_string(), "127.0.0.1:2");
    assert_eq!(config.api_listen.to_string(), API_LISTEN);
    assert_eq!(config.node.name, "n");
    assert!(config.node.trust_forwarded && !UpArgs::default().resolve().unwrap().node.trust_forwarded);
}

#[test]
fn a_nodes_name_can_be_a_labels_value() {
    assert!(node_name(Some("n".repeat(63))).is_ok());
    assert!(node_name(Some("n".repeat(64))).unwrap_err().to_string().contains("63 bytes"));
    assert!(node_name(Some("No Name".into())).is_err());
}

#[test]
fn what_is_wrong_is_named() {
    let listen = UpArgs { api_listen: Some("nowhere".into()), ..Default::default() };
    assert!(format!("{:#}", listen.resolve().unwrap_err()).contains("--api-listen nowhere"));
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("c.toml");
    std::fs::write(&file, "htpp-listen = \"x\"").unwrap();
    let unknown = with_node(NodeOptions { config: Some(file), ..Default::default() });
    assert!(format!("{:#}", unknown.resolve().unwrap_err()).contains("htpp-listen"));
}

#[test]
fn the_file_may_say_where_the_data_is() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("c.toml");
    std::fs::write(&file, "data-dir = \"/srv/mayfly\"").unwrap();
    let args = with_node(NodeOptions { config: Some(file), ..Default::default() });
    assert_eq!(args.resolve().unwrap().data_dir, Some("/srv/mayfly".into()));
}

#[test]
fn sizes_that_hold_nothing_are_refused() {
    let artifacts = |text: &str| UpArgs { artifact_limit: Some(text.into()), ..Default::default() };
    let memory =
        |text: &str| with_node(NodeOptions { function_memory: Some(text.into()), ..Default::default() });
    for (args, expected) in [
        (artifacts("0"), "--artifact-limit 0: nothing could be uploaded"),
        (memory("0"), "--function-memory 0: not even one page"),
        (memory("63Ki"), "--function-memory 63Ki: not even one page"),
        (memory("lots"), "--function-memory lots"),
    ] {
        let error = format!("{:#}", args.resolve().unwrap_err());
        assert!(error.contains(expected), "{error}");
    }
    assert_eq!(memory("64Ki").resolve().unwrap().node.function_memory_bytes, Some(64 << 10));
    assert_eq!(memory("64Ki").resolve().unwrap().node.warning(), None);
    assert!(memory("100Ti").resolve().unwrap().node.warning().unwrap().contains("more than the"));
    assert_eq!(artifacts("1Mi").resolve().unwrap().artifact_bytes_max, 1 << 20);
}

#[test]
fn executions_are_kept_as_long_as_is_said() {
    let kept = |text: &str| {
        let args = UpArgs { workflow_retention: Some(text.into()), ..Default::default() };
        args.resolve().map(|config| config.workflow_retention.as_secs()).map_err(|error| format!("{error:#}"))
    };
    assert_eq!(kept("36h"), Ok(129_600));
    assert_eq!(UpArgs::default().resolve().unwrap().workflow_retention.as_secs(), 90 * 86_400);
    for text in ["soon", "0s", "-1d"] {
        assert!(kept(text).unwrap_err().contains("--workflow-retention"), "{text}");
    }
}

#[test]
fn tasks_are_sent_where_flags_and_file_say() {
    let with = |flags: &[&str], id: Option<&str>| {
        let task_endpoint = flags.iter().map(|flag| (*flag).to_owned()).collect();
        let args = UpArgs { task_endpoint, task_access_key_id: id.map(str::to_owned), ..Default::default() };
        args.resolve()
            .map(|config| format!("{:?}", config.task_endpoints))
            .map_err(|error| format!("{error:#}"))
    };
    assert!(with(&["sqs=http://127.0.0.1:9324/", "eventbridge=https://h/p"], None).unwrap().contains("9324"));
    for (flag, id, reason) in [
        ("sqs", None, "write SERVICE=URL"),
        ("ec2=http://h", None, "cannot be sent to an endpoint"),
        ("sqs=nowhere", None, "is no endpoint"),
        ("sqs=http://h", Some("AK"), "belong together"),
    ] {
        let error = with(&[flag], id).unwrap_err();
        assert!(error.contains(reason), "{flag}: {error}");
    }
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("c.toml");
    std::fs::write(&file, "[task-endpoint]\nsqs = \"http://file:1\"\necs = \"http://file:2\"").unwrap();
    let args = UpArgs {
        task_endpoint: vec!["sqs=http://flag:3".into()],
        node: NodeOptions { config: Some(file), ..Default::default() },
        ..Default::default()
    };
    let told = format!("{:?}", args.resolve().unwrap().task_endpoints);
    assert!(told.contains("flag:3") && told.contains("file:2") && !told.contains("file:1"), "{told}");
}
