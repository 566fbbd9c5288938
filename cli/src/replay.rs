//! `flexcomm replay`.

use crate::doctor::controller_url;
use anyhow::{Context, Result, anyhow, ensure};
use flexcomm_controller::replay::{Choice, Comparison, Replayed, Settings, replay, settings};
use flexcomm_domain::JobId;
use flexcomm_wire::api::{Problem, SnapshotEntry};
use std::fmt::Write;
use std::io::Read;
use std::path::{Path, PathBuf};
use std::time::Duration;

/// Longest time that the controller may take for a page.
const TIMEOUT: Duration = Duration::from_secs(30);

/// Most bytes that are read, of a file or of all a controller's pages together: above what a controller keeps of a job.
const MAX_BYTES: u64 = 256 << 20;

/// Decide a job's recorded decisions again with this flexcomm, one by one, and show what differs.
///
/// The controller keeps with each decision everything that it was made from (links, gains, measured steps, settings), so that
/// a decision that looks strange can be looked at later and elsewhere: with another version, or under other settings. Nothing
/// is changed anywhere. The newest look at a running job is shown as well where it decided nothing ("keep").
#[derive(clap::Args)]
#[command(override_usage = "\
flexcomm replay [OPTIONS] <JOB>
       flexcomm replay [OPTIONS] --from <FILE>")]
#[command(after_help = "\
Answers: same (the whole report is), same strategy (what was seen or predicted is not), DIFFERENT, not replayed (with the
reason; the others go on).

Exit status: 0 when it ran; with --fail-on-difference 1 when a decision is DIFFERENT or not replayed.

Examples:
  flexcomm replay resnet --controller http://ctl:7070    is it decided the same today?
  flexcomm replay resnet --save resnet.json              keep it, or send it to somebody
  flexcomm replay --from resnet.json                     without a controller
  flexcomm replay resnet --set confidence=0.95           what would have been decided by a surer planner?")]
pub struct Args {
    /// The job's name.
    #[arg(required_unless_present = "from", conflicts_with = "from", value_parser = job_name)]
    job: Option<JobId>,
    /// The controller, for example http://127.0.0.1:7070, or HOST or HOST:PORT of one.
    #[arg(long, value_name = "URL", env = "FLEXCOMM_CONTROLLER", default_value = "http://127.0.0.1:7070")]
    controller: String,
    /// Read what --save wrote, or what GET /api/v1/jobs/JOB/snapshots answered.
    #[arg(long, value_name = "FILE")]
    from: Option<PathBuf>,
    /// Write what the controller keeps of the job into a file. It names the job, holds its links, times and the planner's
    /// settings, and no node's name or address.
    #[arg(long, value_name = "FILE", conflicts_with = "from")]
    save: Option<PathBuf>,
    /// Only the newest N entries.
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    last: Option<u32>,
    /// Decide under another setting of the planner ([planner] in the controller's configuration); may be repeated, and all
    /// are checked together. VALUE is JSON or a text.
    #[arg(long, value_name = "KEY=VALUE")]
    set: Vec<String>,
    /// Print JSON: {"software", "replayed": [{"version", "comparison", "at", "software", "recorded", "now", "differences", "form",
    /// "missing"}]}, newest first, times in seconds.
    #[arg(long)]
    json: bool,
    /// End with status 1 when a decision is different or could not be replayed.
    #[arg(long)]
    fail_on_difference: bool,
}

fn job_name(text: &str) -> Result<JobId, String> {
    let is_path = text.contains('/') || Path::new(text).is_file();
    let hint = || if is_path { format!("; did you mean --from {text}?") } else { String::new() };
    text.parse().map_err(|error| format!("{error}{}", hint()))
}

/// Runs `flexcomm replay`.
pub fn run(args: Args) -> Result<()> {
    let settings = settings(&args.set).map_err(|why| crate::BadArgument(format!("--set {why}")))?;
    let last = args.last.map_or(usize::MAX, |last| last as usize);
    let mut entries = match (&args.from, &args.job) {
        (Some(file), _) => read(file, MAX_BYTES)?,
        (None, Some(job)) => {
            fetch(&controller_url(&args.controller), job, last, MAX_BYTES).map_err(|error| with_hint(error, job))?
        }
        (None, None) => bad_argument!("a job or --from FILE is needed"),
    };
    entries.truncate(last);
    if let Some(file) = &args.save {
        let text = serde_json::to_vec(&entries)?;
        std::fs::write(file, text).with_context(|| format!("failed to write --save {}", file.display()))?;
    }
    let replayed: Vec<Replayed> = entries.iter().map(|entry| replay(entry, &settings)).collect();
    if args.json {
        println!("{}", serde_json::json!({ "software": env!("CARGO_PKG_VERSION"), "replayed": replayed }));
    } else {
        print!("{}", table(&replayed, &settings));
    }
    ensure!(!args.fail_on_difference || !replayed.is_empty(), "there is no decision to replay");
    let count = |what: Comparison| replayed.iter().filter(|r| r.comparison == what).count();
    let (different, missing) = (count(Comparison::Different), count(Comparison::NotReplayed));
    ensure!(
        !args.fail_on_difference || different + missing == 0,
        "of {} decisions {different} are different and {missing} not replayed",
        replayed.len()
    );
    Ok(())
}

/// A file's name may be a job's.
fn with_hint(error: anyhow::Error, job: &JobId) -> anyhow::Error {
    match Path::new(job.as_str()).is_file() {
        true => anyhow!("{error:#}; there is a file of this name: did you mean --from {job}?"),
        false => error,
    }
}

/// What `--save` wrote, of at most `most` bytes.
fn read(path: &Path, most: u64) -> Result<Vec<SnapshotEntry>> {
    let what = || format!("failed to read --from {}", path.display());
    let mut text = String::new();
    // Not the size that the file claims: a pipe has none.
    let size = std::fs::File::open(path).and_then(|file| file.take(most + 1).read_to_string(&mut text));
    let size = size.with_context(what)? as u64;
    ensure!(size <= most, "{}: it has more than {most} bytes", what());
    let entries: Vec<SnapshotEntry> = serde_json::from_str(&text).map_err(|error| {
        let form = r#"a JSON list of {"version", "recorded", "missing"}"#;
        anyhow!("{}: {error}; it must be what --save writes, {form}", what())
    })?;
    ensure!(!entries.is_empty(), "{}: it is an empty list: nothing was decided when it was saved", what());
    Ok(entries)
}

/// What a controller has of a job, newest first: at least the newest `last` entries where there are so many, of at most `most`
/// bytes.
#[tokio::main(flavor = "current_thread")]
async fn fetch(controller: &str, job: &JobId, last: usize, most: u64) -> Result<Vec<SnapshotEntry>> {
    let client = reqwest::Client::builder().timeout(TIMEOUT).no_proxy().build()?;
    let url = format!("{}/api/v1/jobs/{job}/snapshots", controller.trim_end_matches('/'));
    let mut entries: Vec<SnapshotEntry> = Vec::new();
    let (mut before, mut left) = (None, most);
    while entries.len() < last {
        let page = match before {
            None => url.clone(),
            Some(version) => format!("{url}?before={version}"),
        };
        let body = get(&client, &page, left).await.with_context(|| format!("failed to get {page}"))?;
        let Some(body) = body else {
            anyhow::bail!(
                "failed to get {page}: job {job} has more than {most} bytes of snapshots; --last N takes the newest"
            );
        };
        left -= body.len() as u64;
        let not_ours = || format!("failed to get {page}: the answer is not that of a flexcomm controller");
        let page: Vec<SnapshotEntry> = serde_json::from_slice(&body).with_context(not_ours)?;
        let Some(oldest) = page.last().map(|entry| entry.version) else { break };
        ensure!(before.is_none_or(|before| oldest < before), "failed to get {url}: it answers the same again");
        before = Some(oldest);
        entries.extend(page);
    }
    Ok(entries)
}

/// The body of an answer; none where it has more than `most` bytes.
async fn get(client: &reqwest::Client, url: &str, most: u64) -> Result<Option<Vec<u8>>> {
    let mut answer = client.get(url).send().await?;
    let status = answer.status();
    let mut body = Vec::new();
    while let Some(chunk) = answer.chunk().await? {
        body.extend_from_slice(&chunk);
        if body.len() as u64 > most {
            return Ok(None);
        }
    }
    if !status.is_success() {
        let problem: Option<Problem> = serde_json::from_slice(&body).ok();
        anyhow::bail!(
            "{}",
            problem.map_or_else(|| status.to_string(), |problem| format!("{status}: {}", problem.detail))
        );
    }
    Ok(Some(body))
}

fn table(replayed: &[Replayed], settings: &Settings) -> String {
    let mut out = String::new();
    // Writing to a string cannot fail.
    let _ = write_table(replayed, settings, &mut out);
    out
}

fn write_table(replayed: &[Replayed], settings: &Settings, out: &mut String) -> std::fmt::Result {
    let this = env!("CARGO_PKG_VERSION");
    let mut by: Vec<&str> = replayed.iter().filter_map(|r| r.software.as_deref()).collect();
    by.sort_unstable();
    by.dedup();
    let by = if by.is_empty() { "an unknown version".to_owned() } else { by.join(", ") };
    writeln!(out, "Recorded by flexcomm {by}, decided again by flexcomm {this}.")?;
    for (key, value) in settings {
        writeln!(out, "Under {key} = {value} in place of what was set.")?;
    }
    if replayed.is_empty() {
        return writeln!(out, "Nothing has been decided for this job yet.");
    }
    let choices = || replayed.iter().flat_map(|r| [&r.recorded, &r.now]).flatten();
    let widths = Widths {
        verdict: choices().map(|c| c.verdict.len()).fold("verdict".len(), usize::max),
        strategy: choices().map(|c| c.strategy.len()).fold("strategy".len(), usize::max),
    };
    writeln!(
        out,
        "\nversion  {:<27}  {:<13}  {:<verdict$}  {:<strategy$}  {:>10} {:>10} {:>7}",
        "decided at",
        "answer",
        "verdict",
        "strategy",
        "t_comp ms",
        "t_sync ms",
        "gain",
        verdict = widths.verdict,
        strategy = widths.strategy
    )?;
    for r in replayed {
        write_row(r, &widths, out)?;
    }
    let count = |what: Comparison| replayed.iter().filter(|r| r.comparison == what).count();
    write!(out, "\n{} the same, {} of the same strategy", count(Comparison::Same), count(Comparison::SameStrategy))?;
    writeln!(out, ", {} different, {} not replayed.", count(Comparison::Different), count(Comparison::NotReplayed))
}

/// Of the columns that are as wide as their longest text.
struct Widths {
    verdict: usize,
    strategy: usize,
}

fn write_row(r: &Replayed, widths: &Widths, out: &mut String) -> std::fmt::Result {
    let answer = match r.comparison {
        Comparison::Same => "same",
        Comparison::SameStrategy => "same strategy",
        Comparison::Different => "DIFFERENT",
        Comparison::NotReplayed => "not replayed",
    };
    let head = format!("{:>7}  {:<27}  {answer:<13}", r.version, r.at.as_deref().unwrap_or("-"));
    match &r.recorded {
        Some(recorded) => writeln!(out, "{head}  {}", choice(recorded, widths))?,
        None => writeln!(out, "{}", head.trim_end())?,
    }
    if let Some(now) = r.now.as_ref().filter(|_| r.comparison != Comparison::Same) {
        writeln!(out, "{:<38}{:<13}  {}", "", "now", choice(now, widths))?;
    }
    for line in r.missing.iter().chain(&r.differences).chain(&r.form) {
        writeln!(out, "         {line}")?;
    }
    Ok(())
}

fn choice(c: &Choice, widths: &Widths) -> String {
    let number = |value: Option<f64>, by: f64, digits| value.map_or("-".to_owned(), |v| format!("{:.digits$}", v * by));
    format!(
        "{:<verdict$}  {:<strategy$}  {:>10} {:>10} {:>7}",
        c.verdict,
        c.strategy,
        number(c.t_comp_s, 1e3, 3),
        number(c.t_sync_s, 1e3, 3),
        number(c.gain, 1.0, 4),
        verdict = widths.verdict,
        strategy = widths.strategy
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::{BufRead, BufReader, Write};
    use std::net::TcpListener;

    /// Answers these pages, one a connection.
    fn serve(pages: [&'static str; 3]) -> String {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let url = format!("http://{}", listener.local_addr().unwrap());
        std::thread::spawn(move || {
            for page in pages {
                let (mut stream, _) = listener.accept().unwrap();
                BufReader::new(&stream).read_line(&mut String::new()).unwrap();
                let head = format!("HTTP/1.1 200 OK\r\nContent-Length: {}\r\nConnection: close\r\n\r\n", page.len());
                stream.write_all((head + page).as_bytes()).unwrap();
            }
        });
        url
    }

    #[test]
    fn pages_and_files_have_one_limit() {
        let pages = [
            r#"[{"version":2,"recorded":null,"missing":"lost"}]"#,
            r#"[{"version":1,"recorded":null,"missing":"lost"}]"#,
            "[]",
        ];
        let job = "j".parse().unwrap();
        let bytes = pages.concat().len() as u64;
        let versions = |entries: Vec<SnapshotEntry>| entries.iter().map(|entry| entry.version).collect::<Vec<_>>();
        assert_eq!(versions(fetch(&serve(pages), &job, usize::MAX, bytes).unwrap()), [2, 1]);
        let error = format!("{:#}", fetch(&serve(pages), &job, usize::MAX, bytes - 1).unwrap_err());
        assert!(error.contains(&format!("job j has more than {} bytes of snapshots", bytes - 1)), "{error}");
        assert!(error.contains("snapshots?before=1: ") && error.contains("--last N"), "{error}");
        // The first page alone.
        let few = pages[0].len() as u64;
        assert_eq!(versions(fetch(&serve(pages), &job, 1, few).unwrap()), [2]);

        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("j.json");
        std::fs::write(&file, pages[0]).unwrap();
        assert_eq!(versions(read(&file, few).unwrap()), [2]);
        let error = format!("{:#}", read(&file, few - 1).unwrap_err());
        assert!(error.ends_with(&format!("j.json: it has more than {} bytes", few - 1)), "{error}");
    }
}
