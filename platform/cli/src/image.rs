//! `mayfly image`: the container images on a node.

use std::path::PathBuf;

use anyhow::Context as _;
use bytes::Bytes;
use clap::{Args, Subcommand};
use futures::{StreamExt as _, TryStreamExt as _};
use http::{Method, Request};
use http_body_util::{BodyExt as _, StreamBody};
use hyper::body::Frame;
use jiff::Timestamp;
use serde_json::Value;
use tower::ServiceExt as _;

use super::{
    failure::{ErrorCode, Failure},
    format, output,
    server::{Server, api_error, segment, with_query},
    session::Session,
    table,
};

/// The label of nodes that run containers.
const NODE_LABEL: &str = "runtime.mayfly.dev/oci";
/// The chunk size of an upload, in bytes.
const CHUNK_BYTES: usize = 256 << 10;

#[derive(Args, Debug)]
#[command(after_help = "Example:
  mayfly image import busybox.tar
  mayfly image list")]
pub(crate) struct ImageArgs {
    /// The node [default: the first one that runs containers]
    #[arg(long, global = true, value_name = "NODE")]
    node: Option<String>,
    #[command(subcommand)]
    command: ImageCommand,
}

#[derive(Subcommand, Debug)]
enum ImageCommand {
    /// List the images on a node
    #[command(visible_alias = "ls", after_help = "Example:\n  mayfly image list -o json")]
    List,
    /// Import the images of an archive: an OCI layout, or the output of docker save
    #[command(after_help = "Example:\n  docker save app:1 -o app.tar\n  mayfly image import app.tar")]
    Import {
        /// The archive, a tar file
        #[arg(required = true, value_name = "FILE")]
        files: Vec<PathBuf>,
    },
    /// Pull an image from its registry
    #[command(after_help = "Example:\n  mayfly image pull registry.example.com/app:1
  mayfly image pull registry.example.com/app:1 --auth-file ~/.docker/config.json")]
    Pull {
        /// Registry, repository, and tag or digest
        #[arg(value_name = "IMAGE")]
        image: String,
        /// Registry credentials, in the format of docker login's ~/.docker/config.json
        #[arg(long, value_name = "FILE")]
        auth_file: Option<PathBuf>,
    },
    /// Remove images from a node. Running containers keep their content
    #[command(visible_alias = "rm", after_help = "Example:\n  mayfly image remove app:1")]
    Remove {
        /// Registry, repository, and tag or digest
        #[arg(required = true, value_name = "IMAGE")]
        images: Vec<String>,
    },
}

pub(crate) async fn run(args: ImageArgs, session: &Session) -> anyhow::Result<()> {
    let server = session.server().await?;
    let node = node(server, args.node).await?;
    let base = format!("/api/v1/nodes/{}/proxy/images", segment(&node));
    match args.command {
        ImageCommand::List => {
            let list = server.get(&base).await?;
            let items = list["items"].as_array().cloned().unwrap_or_default();
            if items.is_empty() && session.globals().output.is_none() {
                output::note(
                    "no images; pods pull what they name, mayfly image pull and mayfly image import bring others",
                );
                return Ok(());
            }
            output::result(session.format(), &list, || rows(&items, Timestamp::now()))
        }
        ImageCommand::Import { files } => {
            for file in files {
                let answer = import(server, &format!("{base}/import"), &file).await;
                print_images(
                    &answer.with_context(|| format!("{} was not imported", file.display()))?,
                    "imported",
                )?;
            }
            Ok(())
        }
        ImageCommand::Pull { image, auth_file } => {
            let logins = auth_file.as_deref().map(logins).transpose()?.unwrap_or(Value::Null);
            let path = with_query(&format!("{base}/pull"), &[("reference", Some(&image))]);
            let answer = server.send(Method::POST, &path, "application/json", &logins).await?;
            print_images(&answer.body, "pulled")
        }
        ImageCommand::Remove { images } => {
            for image in images {
                let path = with_query(&base, &[("reference", Some(&image))]);
                server.send(Method::DELETE, &path, "application/json", &Value::Null).await?;
                output::line(format_args!("{image} removed"))?;
            }
            Ok(())
        }
    }
}

/// The part of a Docker configuration with credentials.
fn logins(file: &std::path::Path) -> anyhow::Result<Value> {
    let unusable = |why: String| {
        Failure::error(
            ErrorCode::InvalidFile,
            format!("cannot use {}: {why}", file.display()),
            "name a file that docker login wrote; logins that a credential helper keeps are not in it",
        )
    };
    let text = std::fs::read(file).map_err(|error| unusable(error.to_string()))?;
    let config: Value = serde_json::from_slice(&text).map_err(|error| unusable(error.to_string()))?;
    match config["auths"].as_object().is_some_and(|auths| !auths.is_empty()) {
        true => Ok(serde_json::json!({"auths": config["auths"]})),
        false => Err(unusable("it has no logins".into())),
    }
}

/// The given node, otherwise the first one that runs containers.
async fn node(server: &Server, named: Option<String>) -> anyhow::Result<String> {
    if let Some(name) = named {
        return Ok(name);
    }
    let list = server.get(&with_query("/api/v1/nodes", &[("labelSelector", Some(NODE_LABEL))])).await?;
    let first = list["items"][0]["metadata"]["name"].as_str().map(str::to_owned);
    first.ok_or_else(|| {
        Failure::error(
            ErrorCode::Unsupported,
            "no node runs containers",
            "mayfly up needs root, containerd, runc and the CNI plugins for them; mayfly up --containers on says what \
             is missing",
        )
    })
}

async fn import(server: &Server, path: &str, file: &std::path::Path) -> anyhow::Result<Value> {
    let archive = tokio::fs::File::open(file).await.map_err(|error| {
        Failure::error(
            ErrorCode::FileError,
            format!("cannot read {}: {error}", file.display()),
            "name a tar file",
        )
    })?;
    let chunks = futures::stream::try_unfold(archive, |mut archive| async move {
        let mut chunk = vec![0; CHUNK_BYTES];
        let read = tokio::io::AsyncReadExt::read(&mut archive, &mut chunk).await?;
        chunk.truncate(read);
        Ok::<_, std::io::Error>((read > 0).then(|| (Bytes::from(chunk), archive)))
    });
    let body = StreamBody::new(chunks.map_ok(Frame::data).boxed());
    let request = Request::post(path).body(body)?;
    let answer = server.streaming()?.oneshot(request).await.map_err(kube::Error::Service)?;
    let status = answer.status();
    let content = answer.into_body().collect().await?.to_bytes();
    if !status.is_success() {
        return Err(api_error(status, &content).into());
    }
    Ok(serde_json::from_slice(&content)?)
}

fn print_images(answer: &Value, what: &str) -> anyhow::Result<()> {
    for item in answer["items"].as_array().into_iter().flatten() {
        output::line(format_args!("{} {what}", item["reference"].as_str().unwrap_or("")))?;
    }
    Ok(())
}

fn rows(items: &[Value], now: Timestamp) -> String {
    let rows: Vec<_> = items
        .iter()
        .map(|item| {
            let digest = item["digest"].as_str().unwrap_or("");
            vec![
                item["reference"].as_str().unwrap_or("").to_owned(),
                digest.chars().take("sha256:".len() + 12).collect(),
                item["bytes"].as_u64().map_or_else(String::new, format::bytes),
                format::age(item["updated"].as_str(), now),
            ]
        })
        .collect();
    table::render(&["IMAGE", "DIGEST", "SIZE", "AGE"], &rows)
}
