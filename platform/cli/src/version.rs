//! `mayfly version`: the version of this program, and of the server if one is reachable.

use clap::Args;
use serde::Serialize;

use super::{output, session::Session};

#[derive(Args, Debug)]
#[command(after_help = "Example:
  mayfly version --client")]
pub(crate) struct VersionArgs {
    /// Do not contact a server
    #[arg(long)]
    client: bool,
}

#[derive(Serialize)]
struct Versions {
    client: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    server: Option<ServerVersion>,
}

#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct ServerVersion {
    url: String,
    git_version: String,
}

pub(crate) async fn run(args: VersionArgs, session: &Session) -> anyhow::Result<()> {
    let mut versions = Versions { client: env!("CARGO_PKG_VERSION").into(), server: None };
    if !args.client {
        match server_version(session).await {
            Ok(found) => versions.server = Some(found),
            // The command succeeds, since it has shown this program's version.
            Err(error) => {
                let error = session.explain(error);
                output::note(format_args!("server: {}", super::failure::text(&error)));
            }
        }
    }
    output::result(session.format(), &versions, || {
        let mut text = format!("client: mayfly {}\n", versions.client);
        if let Some(server) = &versions.server {
            text.push_str(&format!("server: Kubernetes API {} at {}\n", server.git_version, server.url));
        }
        text
    })
}

async fn server_version(session: &Session) -> anyhow::Result<ServerVersion> {
    let server = session.server().await?;
    let version = server.get("/version").await?;
    let git_version = version["gitVersion"].as_str().unwrap_or("of an unknown version").to_owned();
    Ok(ServerVersion { url: server.url(), git_version })
}
