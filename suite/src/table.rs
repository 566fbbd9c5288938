//! The summary as a table, for a terminal.

use crate::adaptive::Experiments;
use crate::score::Interval;
use crate::summary::{Accuracy, Method, Over, Problems, RatioStats, Reaction, Spread, Summary, Worst};
use std::fmt::Write;

/// What no cell shows, whatever its numbers.
const LEFT_OUT: &str = "\
Not in the truth: packets one by one and congestion control other than windows that double, halve and time out; several switches \
or routes (ports of NICs are the only bottlenecks); NCCL's and GPU's own behaviour; cores and memory that computing, compression, \
agents and controller compete for; samples of gradients that ranks send for shadows of AR-Topk, the time of those shadows and of \
copies for trials; passes of the controller, TLS and lost echoes; ranks that come, go or are slower \
for good; clocks that drift; models of more than a few layers, whose gradients these stand for by a factor, with which all grows that \
is not fixed: PowerSGD's factors too, which would grow with the root of it, and the one value of a bucket that top-k keeps at least.";

impl Summary {
    /// For a terminal.
    pub fn table(&self) -> String {
        let mut text = String::new();
        // Writing into a string does not fail.
        let _ = self.write(&mut text);
        text
    }

    fn write(&self, out: &mut String) -> std::fmt::Result {
        let cells: usize = self.by_family.iter().map(|group| group.cells).sum();
        let runs = self.cells.iter().filter(|row| row.setting == "flexcomm").count();
        let frozen = if self.frozen { "as frozen" } else { "NOT the frozen ones: compare with no other result" };
        writeln!(
            out,
            "\n{cells} cells, {runs} runs of flexcomm; cells and truth are {frozen} (digest {})",
            self.digest
        )?;
        if !self.failed.is_empty() {
            writeln!(out, "FAILED, and counted as three budgets: {}", self.failed.join(", "))?;
        }
        writeln!(
            out,
            "\nSeconds to the target, over those of ... (below 1 is faster; 95 % intervals; p95 and worst of cells)\n"
        )?;
        writeln!(out, "{:20}{:^36}{:^36}{:^22}", "", "each cell's best fixed setting", "dense", "the oracle")?;
        let titles = |oracle: bool| if oracle { "  mean  interval" } else { "  mean  interval       p95  worst   " };
        writeln!(out, "{:20}{:36}{:36}{:22}", "", titles(false), titles(false), titles(true))?;
        for who in Method::ALL {
            let long = |over| match self.of(who, over) {
                Some(c) => format!("{:>6.2}  {}  {:>6.2} {:>6.2}", c.geomean, interval(&c.interval), c.p95, c.worst),
                None => String::new(),
            };
            let short = |c: &RatioStats| format!("{:>6.2}  {}", c.geomean, interval(&c.interval));
            let oracle = self.of(who, Over::Oracle).map_or(String::new(), short);
            if self.of(who, Over::Dense).is_some() {
                writeln!(out, "{:20}{:36}{:36}{oracle}", who.name(), long(Over::BestFixed), long(Over::Dense))?;
            }
        }
        if let Some(best) = &self.best_average_fixed {
            writeln!(out, "\nThe best average fixed setting is {best}.")?;
        }
        writeln!(out, "\nFlexcomm over each fixed setting")?;
        for (setting, ratio) in &self.geomean_vs_fixed {
            writeln!(out, "  {setting:<44}{ratio:>6.2}")?;
        }
        if let Some(worst) = self.worst_ratio_to_best_fixed_60s {
            writeln!(out, "  the worst cell's best one, phases from 60 s{worst:>7.2}")?;
        }
        self.write_groups(out)?;
        self.write_flexcomm(out)?;
        writeln!(out, "\n{}", wrapped(LEFT_OUT))
    }

    fn write_groups(&self, out: &mut String) -> std::fmt::Result {
        let shown: Vec<Method> =
            Method::ALL.into_iter().filter(|who| self.of(*who, Over::BestFixed).is_some()).collect();
        let titles = [
            ("family", &self.by_family),
            ("length of phases", &self.by_phase),
            ("communication / computing", &self.by_ratio),
        ];
        for (title, groups) in titles {
            write!(out, "\n{:<46}cells", format!("over best fixed, by {title}"))?;
            writeln!(out, "{}", shown.iter().map(|who| format!("  {:<20}", who.name())).collect::<String>())?;
            for group in groups {
                let of = |who: &Method| {
                    let found = group.compared.iter().find(|compared| compared.who == *who);
                    found.map_or(" ".repeat(22), |c| format!("{:>6.2}  {}", c.geomean, interval(&c.interval)))
                };
                writeln!(out, "  {:<44}{:>5}{}", group.name, group.cells, shown.iter().map(of).collect::<String>())?;
            }
        }
        Ok(())
    }

    fn write_flexcomm(&self, out: &mut String) -> std::fmt::Result {
        writeln!(
            out,
            "\nWhere flexcomm loses most against the best fixed setting, and what most of the time over the oracle's is"
        )?;
        for Worst { cell, ratio, cause, share, errors } in &self.worst {
            let why = cause.zip(*share).map(|(cause, share)| format!("{} ({:.0} %)", cause.text(), 100.0 * share));
            let why = if *errors > 0 { Some(format!("{errors} runs ended with an error")) } else { why };
            writeln!(out, "  {cell:<20}{ratio:>6.2}  {}", why.unwrap_or_default())?;
        }
        let number =
            |value: Option<f64>, factor: f64| value.map_or("-".into(), |value| format!("{:.1}", factor * value));
        let percent = |spread: Spread| {
            format!("{} % at the median, {} % at p95", number(spread.median, 100.0), number(spread.p95, 100.0))
        };
        let Experiments { seconds, shadow_seconds, bytes, cpu_seconds } = self.experiments.mean;
        let gigabytes = bytes / 1e9;
        writeln!(out, "\nFlexcomm's runs")?;
        writeln!(out, "  live trials, of a run's time     {}", percent(self.experiments.share_of_time))?;
        writeln!(
            out,
            "  experiments in the mean of runs  {seconds:.1} s and {shadow_seconds:.1} s of shadow trials, {gigabytes:.2} GB, \
             {cpu_seconds:.1} s of cores"
        )?;
        let Reaction { seconds, share_of_phase, made, missed, unneeded } = self.reaction;
        let (median, p95) = (number(seconds.median, 1.0), number(seconds.p95, 1.0));
        writeln!(out, "  from a change to a better one    {median} s at the median, {p95} s at p95")?;
        writeln!(out, "  the same, of a phase's length    {}", percent(share_of_phase))?;
        writeln!(
            out,
            "  changes of the network           {made} answered, {missed} not answered, {unneeded} asked for nothing"
        )?;
        writeln!(out, "  predicted t_sync is wrong by     {}", percent(self.prediction_error))?;
        for Accuracy { who, median, worst, below, runs } in &self.accuracy_over_dense {
            let title = match who {
                Method::Flexcomm => "final accuracy over dense's".to_owned(),
                control => format!("the same, of the {}", control.name()),
            };
            let (median, worst) = (100.0 * median, 100.0 * worst);
            writeln!(
                out,
                "  {title:<33}{median:+.2} points at the median, {worst:+.2} at worst, {below} of {runs} runs below -0.5"
            )?;
        }
        let Problems { count, runs, first } = &self.problems;
        let example = first.as_ref().map_or(String::new(), |first| {
            format!(" in {runs} runs; the first: {}", first.chars().take(70).collect::<String>())
        });
        writeln!(out, "  refused requests and orders      {count}{example}")?;
        writeln!(
            out,
            "  target not reached               {} runs, {} of them with an error",
            self.unreached, self.errors
        )
    }
}

fn interval(interval: &Interval) -> String {
    // A single value has none.
    if interval.low == interval.high {
        format!("{:>13} ", "-")
    } else {
        format!("{:>5.2} -{:>6.2} ", interval.low, interval.high)
    }
}

/// In lines of a terminal.
fn wrapped(text: &str) -> String {
    let mut lines: Vec<String> = vec![String::new()];
    for word in text.split_whitespace() {
        if let Some(line) = lines.last_mut().filter(|line| line.len() + word.len() < 110) {
            let space = if line.is_empty() { "" } else { " " };
            line.push_str(space);
            line.push_str(word);
        } else {
            lines.push(word.to_owned());
        }
    }
    lines.join("\n")
}
