//! Starts the cluster, makes the links follow the trace, shows what happens, ends it.

use anyhow::{Context, Result, bail};
use flexcomm_domain::Link;
use flexcomm_wire::api::{DecisionView, JobView, ScenarioSet};
use std::io::{ErrorKind, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;
use std::time::{Duration, Instant};
use tokio::sync::watch;

use super::processes::Processes;
use super::rest::Rest;
use super::summary::Summary;
use super::{say, view};
use crate::plan::{LabPlan, TOKEN_FILE};

/// Time between two looks at the controller.
const LOOK: Duration = Duration::from_secs(1);

/// Longest the cluster may take to come up on one busy CPU.
const START_LIMIT: Duration = Duration::from_secs(60);

/// Runs the whole life of the emulated cluster.
pub(crate) async fn drive(plan: &LabPlan, mut stop: watch::Receiver<bool>) -> Result<()> {
    let token_file = Path::new("/run/flexlab/token");
    let token = format!("lab-{:016x}", rand::random::<u64>());
    std::fs::write(token_file, &token).context("the cluster's token")?;
    // What is in /run cannot be read on the host.
    let shown = plan.out.join(TOKEN_FILE);
    write_private(&shown, &token).with_context(|| shown.display().to_string())?;
    let mut processes = Processes::new(&plan.out)?;
    let rest = Rest::new(&token)?;
    let mut summary = Summary::default();
    let outcome = tokio::select! {
        done = live(plan, &mut processes, &rest, token_file, &mut summary) => done,
        _ = stop.wait_for(|stopped| *stopped) => Ok(()),
    };
    // One that was told to stop while it started has no history.
    if rest.ready().await
        && let Err(error) = collect(&rest, &mut summary).await
    {
        say(&format!("the controller's history could not be read: {error:#}"));
    }
    summary.cpu(processes.cpu());
    processes.stop().await;
    summary.write(plan)?;
    say(&summary.text(plan));
    outcome
}

/// Writes a file that its owner alone may read, in the place of an earlier lab's, whose mode may be another.
fn write_private(path: &Path, text: &str) -> std::io::Result<()> {
    match std::fs::remove_file(path) {
        Err(error) if error.kind() != ErrorKind::NotFound => return Err(error),
        _ => {}
    }
    let mut file = std::fs::OpenOptions::new().write(true).create_new(true).mode(0o600).open(path)?;
    file.write_all(text.as_bytes())
}

async fn collect(rest: &Rest, summary: &mut Summary) -> Result<()> {
    summary.finish(rest.history().await?, rest.intervals().await?, rest.trials().await?);
    Ok(())
}

async fn live(
    plan: &LabPlan,
    processes: &mut Processes,
    rest: &Rest,
    token_file: &Path,
    summary: &mut Summary,
) -> Result<()> {
    say(&format!("{} nodes on one bridge; starting the controller", plan.nodes));
    processes.start_controller(token_file)?;
    wait("the controller", processes, || async { Ok(rest.ready().await) }).await?;
    for i in 0..plan.nodes {
        processes.start_agent(i, token_file)?;
    }
    wait("the agents", processes, || async { Ok(rest.live_nodes().await? == plan.nodes) }).await?;
    say("controller and agents are up; setting the first phase of the trace");
    let mut lab =
        Lab { plan, rest, summary, links_set: None, shown: 0, decision: None, job: None, started: Instant::now() };
    lab.set_links(plan.schedule.first_epoch()).await?;
    wait("the first phase of the trace", processes, || async { in_force(rest, plan.nodes).await }).await?;
    for i in 0..plan.nodes {
        processes.start_worker(plan, i)?;
    }
    say(
        "workers started; table follows (a row at the end of every epoch; in parentheses: measured before the links were set)",
    );
    view::HEADER.iter().for_each(|line| say(line));
    while !lab.out_of_time() && (plan.stay || !processes.training_is_over()?) {
        processes.check()?;
        lab.look().await?;
        tokio::time::sleep(LOOK).await;
    }
    // The last steps were reported while nobody looked.
    lab.look().await
}

async fn in_force(rest: &Rest, nodes: usize) -> Result<bool> {
    let Some(view) = rest.scenario().await? else { return Ok(false) };
    if let Some((node, why)) = view.refused.first() {
        bail!("{node} refuses to shape its link: {why}");
    }
    Ok(view.in_force.len() == nodes)
}

async fn wait<F, R>(what: &str, processes: &mut Processes, mut ready: F) -> Result<()>
where
    F: FnMut() -> R,
    R: Future<Output = Result<bool>>,
{
    let since = Instant::now();
    while !ready().await? {
        processes.check()?;
        if since.elapsed() > START_LIMIT {
            bail!("{what} did not come up within {} s", START_LIMIT.as_secs());
        }
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
    Ok(())
}

struct Lab<'a> {
    plan: &'a LabPlan,
    rest: &'a Rest,
    summary: &'a mut Summary,
    /// In force.
    links_set: Option<LinksSet>,
    /// How many epochs have a row.
    shown: u32,
    decision: Option<DecisionView>,
    /// As last seen while it ran.
    job: Option<JobView>,
    started: Instant,
}

/// What the links were set to.
struct LinksSet {
    /// First epoch of its phase.
    first_epoch: u32,
    link: Link,
    since: Instant,
}

impl Lab<'_> {
    fn out_of_time(&self) -> bool {
        self.plan.for_s.is_some_and(|limit| self.started.elapsed().as_secs_f64() >= limit)
    }

    /// Sets the links of an epoch when it differs from the one in force.
    async fn set_links(&mut self, epoch: u32) -> Result<()> {
        let phase = self.plan.schedule.at(epoch);
        let first_epoch = phase.first_epoch;
        if self.links_set.as_ref().is_some_and(|w| w.first_epoch == first_epoch) {
            return Ok(());
        }
        let label = format!("{} epoch {epoch}: {}", self.plan.schedule.name(), phase.label);
        say(&format!("-- {label}: links set to {} and {}", phase.alpha, phase.bandwidth));
        let set = ScenarioSet {
            label,
            latency_us: phase.alpha.get() * 1e6,
            jitter_us: phase.jitter.get() * 1e6,
            loss: phase.loss,
            bandwidth_bps: phase.bandwidth.get(),
            nodes: None,
        };
        self.rest.set_scenario(&set).await?;
        self.links_set = Some(LinksSet { first_epoch, link: phase.link(), since: Instant::now() });
        Ok(())
    }

    /// The epoch that a step belongs to, counted as the schedule counts; the last one when training is over.
    fn epoch_of(&self, step: u64) -> u32 {
        let done = (step / self.plan.steps_per_epoch).min(u64::from(self.plan.schedule.epochs() - 1));
        self.plan.schedule.first_epoch() + done as u32
    }

    /// One look at the controller: new decisions, epochs that ended, the links of the next.
    async fn look(&mut self) -> Result<()> {
        let Some(job) = self.rest.job().await? else { return Ok(()) };
        let job = match &self.job {
            // A job whose ranks have left has no times any more; the end of its last epoch had.
            Some(last) if job.live_ranks == 0 => {
                JobView { step: job.step, loss: job.loss, accuracy: job.accuracy, ..last.clone() }
            }
            _ => job,
        };
        self.job = Some(job.clone());
        let decision = self.rest.decision().await?;
        let version = |d: &Option<DecisionView>| d.as_ref().map_or(0, |d| d.version);
        if version(&decision) != version(&self.decision)
            && let Some(d) = &decision
        {
            say(&view::decision(d));
        }
        self.decision = decision;
        // What an epoch's row says was measured under that epoch's links: the row first, then the next links.
        let ended = ((job.step + 1) / self.plan.steps_per_epoch).min(u64::from(self.plan.schedule.epochs())) as u32;
        if ended > self.shown {
            self.shown = ended;
            self.show(self.plan.schedule.first_epoch() + ended - 1, &job).await?;
        }
        self.set_links(self.epoch_of(job.step)).await
    }

    async fn show(&mut self, epoch: u32, job: &JobView) -> Result<()> {
        let links = self.rest.links().await?;
        let Some(current) = &self.links_set else { return Ok(()) };
        let moment = view::Moment {
            epoch: (epoch, self.plan.schedule.first_epoch() + self.plan.schedule.epochs() - 1),
            set: current.link,
            set_for: current.since.elapsed(),
            links: &links,
            job,
            decision: self.decision.as_ref(),
        };
        let row = view::row(&moment);
        say(&row);
        self.summary.row(row);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::PermissionsExt;

    #[test]
    fn a_token_is_its_owners_alone_whatever_stood_there() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join(TOKEN_FILE);
        std::fs::write(&path, "an earlier lab's").unwrap();
        write_private(&path, "lab-1").unwrap();
        assert_eq!(std::fs::read_to_string(&path).unwrap(), "lab-1");
        assert_eq!(std::fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o600);
    }
}
