//! `mayfly artifact`: components, and the inputs and outputs of jobs, in the artifact store.

use std::path::{Path, PathBuf};

use anyhow::Context as _;
use clap::{Args, Subcommand};
use http::Method;
use jiff::Timestamp;
use mayfly_api::Digest;
use serde_json::Value;

use super::{
    bounded_read::{self, CONTENT_BYTES_MAX},
    component,
    failure::{ErrorCode, Failure},
    format, output,
    server::{Server, is_not_found},
    session::Session,
    table,
    upload::{self, Content, Upload},
};

/// The type of the report that a node writes about a job's pod.
const JOB_REPORT: &str = "jobReport";

#[derive(Args, Debug)]
#[command(after_help = "Example:
  mayfly artifact push data.csv
  mayfly artifact list")]
pub(crate) struct ArtifactArgs {
    #[command(subcommand)]
    command: ArtifactCommand,
}

#[derive(Subcommand, Debug)]
enum ArtifactCommand {
    /// List components, data, and outputs of jobs
    #[command(visible_alias = "ls")]
    #[command(after_help = "Example:
  mayfly artifact list -o json")]
    List {
        /// Also list the report about each pod of a job
        #[arg(short, long)]
        all: bool,
    },
    /// Upload files; prints the digest of each, which jobs and workflows name them by
    #[command(after_help = "Example:
  mayfly artifact push extract.wasm data.csv")]
    Push {
        /// A component, or any other file
        #[arg(required = true, value_name = "FILE")]
        files: Vec<PathBuf>,
    },
    /// Write an artifact to a file, or to stdout
    #[command(after_help = "Example:
  mayfly artifact get sha256:2cf24dba5fb0 --out words.tsv")]
    Get {
        /// The digest, or the beginning of it
        #[arg(value_name = "DIGEST")]
        digest: String,
        /// Where to write it
        #[arg(long, value_name = "FILE")]
        out: Option<PathBuf>,
    },
    /// Delete artifacts. Components that no revision uses are removed automatically
    #[command(visible_alias = "rm")]
    #[command(after_help = "Example:
  mayfly artifact delete sha256:2cf24dba5fb0")]
    Delete {
        /// The digest, or the beginning of it
        #[arg(required = true, value_name = "DIGEST")]
        digests: Vec<String>,
    },
}

pub(crate) async fn run(args: ArtifactArgs, session: &Session) -> anyhow::Result<()> {
    let server = session.server().await?;
    if let ArtifactCommand::Push { files } = &args.command {
        let mut pushed = Vec::new();
        for file in files {
            let digest = push(server, file).await?;
            pushed
                .push(serde_json::json!({"file": file.display().to_string(), "digest": digest.to_string()}));
        }
        let lines =
            || pushed.iter().filter_map(|one| Some(format!("{}\n", one["digest"].as_str()?))).collect();
        return output::result(session.format(), &pushed, lines);
    }
    let list = server.get("/artifacts").await?;
    let items = list["items"].as_array().cloned().unwrap_or_default();
    match args.command {
        ArtifactCommand::List { all } => show(session, list, all),
        ArtifactCommand::Push { .. } => Ok(()),
        ArtifactCommand::Get { digest, out } => {
            let digest = complete(&digest, &items)?;
            match out {
                Some(path) => save(server, &digest, &path).await,
                None => upload::download(server, &digest, &mut std::io::stdout()).await,
            }
        }
        ArtifactCommand::Delete { digests } => {
            for text in digests {
                let digest = complete(&text, &items)?;
                let path = upload::path(&digest);
                match server.send(Method::DELETE, &path, "application/json", &Value::Null).await {
                    Ok(_) => output::line(format_args!("{digest} deleted"))?,
                    Err(error) if is_not_found(&error) => return Err(missing(&text)),
                    Err(error) => return Err(error.into()),
                }
            }
            Ok(())
        }
    }
}

/// Uploads a file; returns its digest.
pub(crate) async fn push(server: &Server, file: &Path) -> anyhow::Result<Digest> {
    let content = bounded_read::file(file, CONTENT_BYTES_MAX).map_err(|error| {
        let todo = "name a file; a folder is pushed as a tar (tar -cf)";
        Failure::error(ErrorCode::FileError, format!("cannot read {}: {error}", file.display()), todo)
    })?;
    let content = component::of_content(content, file)?;
    let is_component = Content::of(&content) == Content::Component;
    let digest = Digest::of(&content);
    let uploaded = upload::upload(server, &digest, content).await;
    match uploaded.with_context(|| format!("{} was not uploaded", file.display()))? {
        Upload::Sent => output::note(format_args!("{} uploaded", file.display())),
        Upload::AlreadyThere => output::note(format_args!("{} was there already", file.display())),
    }
    if is_component {
        output::note(format_args!("  runs in a Pod or a Job with runtimeClassName: wasm, image: {digest}"));
    }
    Ok(digest)
}

/// Prints the list. A job with a hundred pods has a hundred reports, which are shown only with `all`.
fn show(session: &Session, mut list: Value, all: bool) -> anyhow::Result<()> {
    let mut items = list["items"].as_array().cloned().unwrap_or_default();
    let there = items.len();
    items.retain(|item| all || item["type"] != JOB_REPORT);
    let hidden = there - items.len();
    list["items"] = items.into();
    let items = list["items"].as_array().map_or(&[][..], Vec::as_slice);
    if !items.is_empty() || session.globals().output.is_some() {
        output::result(session.format(), &list, || rows(items, Timestamp::now()))?;
    } else if hidden == 0 {
        output::note("no artifacts; mayfly deploy and mayfly artifact push upload them");
    }
    if hidden > 0 {
        let reports = if hidden == 1 { "1 job report is" } else { &format!("{hidden} job reports are") };
        output::note(format_args!("{reports} not shown; --all shows everything"));
    }
    Ok(())
}

fn rows(items: &[Value], now: Timestamp) -> String {
    let rows: Vec<_> = items
        .iter()
        .map(|item| {
            vec![
                item["digest"].as_str().unwrap_or("").to_owned(),
                match item["type"].as_str() {
                    Some(JOB_REPORT) => "job report".to_owned(),
                    other => other.unwrap_or("").to_owned(),
                },
                item["bytes"].as_u64().map_or_else(String::new, format::bytes),
                format::age(item["created"].as_str(), now),
            ]
        })
        .collect();
    table::render(&["DIGEST", "TYPE", "SIZE", "AGE"], &rows)
}

/// The digest that is given in full, or the only one with this prefix.
fn complete(text: &str, items: &[Value]) -> anyhow::Result<Digest> {
    if let Ok(digest) = text.parse() {
        return Ok(digest);
    }
    let begins = if text.starts_with("sha256:") { text.to_owned() } else { format!("sha256:{text}") };
    let known = items.iter().filter_map(|item| item["digest"].as_str()?.parse::<Digest>().ok());
    let found: Vec<_> = known.filter(|digest| digest.to_string().starts_with(&begins)).collect();
    match found.as_slice() {
        [only] => Ok(*only),
        [] => Err(missing(text)),
        many => Err(Failure::error(
            ErrorCode::Usage,
            format!("{} artifacts begin with {text:?}", many.len()),
            "write more digits",
        )),
    }
}

fn missing(text: &str) -> anyhow::Error {
    Failure::error(
        ErrorCode::NotFound,
        format!("there is no artifact {text}"),
        "see what there is: mayfly artifact list",
    )
}

/// Writes an artifact to a file atomically: on a failure the old file is unchanged.
async fn save(server: &Server, digest: &Digest, path: &Path) -> anyhow::Result<()> {
    let refused = |error: std::io::Error| {
        Failure::error(
            ErrorCode::FileError,
            format!("cannot write {}: {error}", path.display()),
            "name another --out",
        )
    };
    if path.metadata().is_ok_and(|found| !found.is_file()) {
        // A device or a pipe is written to, not replaced.
        let mut file = std::fs::File::options().write(true).open(path).map_err(refused)?;
        return upload::download(server, digest, &mut file).await;
    }
    let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."));
    // Not secret: the mode follows the user's umask.
    let open = std::os::unix::fs::PermissionsExt::from_mode(0o666);
    let mut file = tempfile::Builder::new().permissions(open).tempfile_in(folder).map_err(refused)?;
    upload::download(server, digest, &mut file).await?;
    file.persist(path).map_err(|error| refused(error.error))?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn the_beginning_of_a_digest_is_enough() {
        let (a, b) = (Digest::of(b"a"), Digest::of(b"b"));
        let items = [json!({"digest": a.to_string()}), json!({"digest": b.to_string()})];
        assert_eq!(complete(&a.to_string(), &[]).unwrap(), a);
        assert_eq!(complete(&a.short(), &items).unwrap(), a);
        assert_eq!(complete(&format!("sha256:{}", b.short()), &items).unwrap(), b);
        assert!(complete("", &items).unwrap_err().to_string().contains("2 artifacts begin"));
        assert!(complete("zz", &items).is_err());
    }
}
