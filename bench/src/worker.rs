//! The process that measures: it can be ended in the middle of a step.
//!
//! It is this binary with a hidden sub-command. It reads a [`Job`] from its input, one line, and answers lines of JSON. The
//! input stays open as long as the process that asked lives: at its end this one ends too, however the other was ended.

use super::data::{DType, Distribution};
use super::measure::{self, Case, Row};
use super::{fitted, torch};
use anyhow::{Context, Result, anyhow};
use serde::{Deserialize, Serialize};
use std::collections::VecDeque;
use std::io::{BufRead, BufReader, Write};
use std::os::unix::process::ExitStatusExt;
use std::path::PathBuf;
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::time::{Duration, Instant};

/// How often Ctrl-C is looked for.
const LOOK: Duration = Duration::from_millis(50);

/// SIGINT: a terminal sends it to both processes.
const INTERRUPTED: i32 = 2;

/// A method of the table.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub enum Asked {
    /// In the textual form.
    Strategy(String),
    /// A name whose parameters are chosen from the values.
    Fitted(String),
}

impl Asked {
    /// As far as it is known before there are values.
    pub fn text(&self) -> &str {
        match self {
            Self::Strategy(text) | Self::Fitted(text) => text,
        }
    }

    /// As in the table.
    pub fn label(&self) -> String {
        match self {
            Self::Strategy(text) => text.clone(),
            Self::Fitted(name) => format!("{name}*"),
        }
    }
}

/// What one process measures.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Job {
    /// In this order.
    pub methods: VecDeque<Asked>,
    /// Values.
    pub n: usize,
    /// Of the values.
    pub distribution: Distribution,
    /// Of the gradient.
    pub dtype: DType,
    /// Each with an equal part.
    pub threads: usize,
    /// No repetition begins later.
    pub max_time_s: f64,
    /// With torch that is still to be timed.
    pub python: Option<PathBuf>,
    /// Of torch.topk, where it is known.
    pub torch_s: Option<f64>,
}

/// A line of the process.
#[derive(Debug, Serialize, Deserialize)]
pub enum Message {
    /// It prepares.
    Progress(String),
    /// torch.topk was timed; None where it failed.
    Torch(Option<f64>),
    /// A method is measured from now on.
    Begun(String),
    /// And was.
    Row(Box<Row>),
    /// It was not, for this reason, or where none had begun, nothing can be.
    Failed(String),
}

/// What comes next from the process.
#[derive(Debug)]
pub enum Event {
    /// It wrote a line.
    Message(Message),
    /// It had no row at the limit; the process is to be ended.
    Late,
    /// Ctrl-C; the process is ended.
    Stopped,
    /// The process ended well.
    Done,
}

/// A process that measures. Dropping it ends it.
pub struct Worker {
    child: Child,
    /// Open as long as the process is to run: not the child's own, which waiting for it would close.
    _input: ChildStdin,
    lines: Receiver<String>,
    /// Since when a method is measured.
    begun: Option<Instant>,
}

impl Worker {
    /// Starts it on a job.
    pub fn start(job: &Job) -> Result<Self> {
        let program = std::env::current_exe().context("failed to find this program's file")?;
        let mut command = Command::new(program);
        command.args(["bench", "measure-compressors"]).stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut child = command.spawn().context("failed to start the process that measures")?;
        let (to, lines) = channel();
        let output = BufReader::new(child.stdout.take().context("no pipe from the process that measures")?);
        std::thread::spawn(move || output.lines().map_while(Result::ok).try_for_each(|line| to.send(line)));
        let mut input = child.stdin.take().context("no pipe to the process that measures")?;
        let line = format!("{}\n", serde_json::to_string(job)?);
        input.write_all(line.as_bytes()).context("failed to hand over what to measure")?;
        Ok(Self { child, _input: input, lines, begun: None })
    }

    /// Waits for what comes next, at most until a method has taken `limit` or `stop` is set.
    pub fn next(&mut self, limit: Duration, stop: &AtomicBool) -> Event {
        loop {
            let left = self.begun.map_or(LOOK, |begun| limit.saturating_sub(begun.elapsed()));
            match self.lines.recv_timeout(left.min(LOOK)) {
                Ok(line) => return self.read(&line),
                Err(RecvTimeoutError::Disconnected) => return self.ended(),
                Err(RecvTimeoutError::Timeout) => {}
            }
            if stop.load(Ordering::Relaxed) {
                return Event::Stopped;
            }
            if self.begun.is_some_and(|begun| begun.elapsed() >= limit) {
                return Event::Late;
            }
        }
    }

    fn read(&mut self, line: &str) -> Event {
        let unread = |error| Message::Failed(format!("failed to read its row: {error}"));
        let message = serde_json::from_str(line).unwrap_or_else(unread);
        self.begun = matches!(message, Message::Begun(_)).then(Instant::now);
        Event::Message(message)
    }

    fn ended(&mut self) -> Event {
        let failed = match self.child.wait() {
            Ok(status) if status.success() => return Event::Done,
            Ok(status) if status.signal() == Some(INTERRUPTED) => return Event::Stopped,
            Ok(status) => format!("the process that measured it ended with {status}"),
            Err(error) => format!("the process that measured it is lost: {error}"),
        };
        Event::Message(Message::Failed(failed))
    }
}

impl Drop for Worker {
    fn drop(&mut self) {
        // It may have ended by itself.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn write(message: &Message) -> Result<()> {
    let mut out = std::io::stdout().lock();
    serde_json::to_writer(&mut out, message)?;
    out.write_all(b"\n")?;
    Ok(out.flush()?)
}

/// Runs the process that measures.
pub fn run() -> Result<()> {
    let mut line = String::new();
    std::io::stdin().read_line(&mut line)?;
    let job: Job = serde_json::from_str(&line).context("failed to read what to measure")?;
    std::thread::spawn(end_with_input);
    write(&Message::Progress(format!("making {} values, {}", job.n, job.distribution.name())))?;
    let values = job.distribution.values(job.n + measure::MORE, job.dtype);
    let torch_s = match &job.python {
        Some(python) => time_torch(python, &values[..job.n], job.threads)?,
        None => job.torch_s,
    };
    let max_time = Duration::from_secs_f64(job.max_time_s);
    let case = Case { values: &values, dtype: job.dtype, threads: job.threads, max_time };
    for method in &job.methods {
        write(&Message::Begun(method.label()))?;
        let message = match measured(method, &case, (job.distribution, torch_s)) {
            Ok(row) => Message::Row(Box::new(row)),
            Err(error) => Message::Failed(format!("failed: {error:#}")),
        };
        write(&message)?;
        if matches!(message, Message::Failed(_)) {
            return Ok(());
        }
    }
    Ok(())
}

/// A signal may leave the process that asked no time to end this one.
fn end_with_input() {
    // An error is an end too.
    let _ = std::io::copy(&mut std::io::stdin().lock(), &mut std::io::sink());
    std::process::exit(1);
}

fn time_torch(python: &std::path::Path, values: &[f32], threads: usize) -> Result<Option<f64>> {
    write(&Message::Progress(format!("torch.topk, n = {}", values.len())))?;
    let seconds = torch::topk_seconds(python, values, threads);
    let known = seconds.map_err(|error| eprintln!("torch.topk: {error:#}; its column stays empty")).ok();
    write(&Message::Torch(known))?;
    Ok(known)
}

fn measured(method: &Asked, case: &Case<'_>, (distribution, torch_s): (Distribution, Option<f64>)) -> Result<Row> {
    let (text, fitted) = match method {
        Asked::Strategy(text) => (text.clone(), false),
        Asked::Fitted(name) => (fitted::text(name, case.values)?, true),
    };
    let strategy = text.parse().map_err(|error| anyhow!("failed to {error}"))?;
    let row = measure::row(&strategy, case, distribution)?;
    Ok(Row { fitted, ratio_to_torch: torch_s.map(|torch| row.compress_s / torch.max(1e-9)), ..row })
}
