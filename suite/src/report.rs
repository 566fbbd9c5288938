//! What results show, as files and as a summary: at the end of a run, and of those that are there.

use crate::baselines::{Adapted, Baselines, Record, RecordedPlanner};
use crate::cells::Cell;
use crate::digests;
use crate::files;
use crate::fixed::Library;
use crate::plot;
use crate::run::{self, path_of};
use crate::summary::{Provenance, Summary};
use anyhow::{Context, Result, ensure};
use flexcomm_truth::coefficients::Coefficients;
use std::path::Path;

/// Writes `summary.json` and all plots into the folder `target`.
pub fn write(target: &Path, records: &[Record], provenance: Provenance) -> Result<Summary> {
    let summary = Summary::new(records, provenance);
    files::write_json(&target.join("summary.json"), &summary)?;
    let groups = [
        ("regret-by-family", "Regret by family", &summary.by_family),
        ("regret-by-phase", "Regret by length of phases", &summary.by_phase),
        ("regret-by-ratio", "Regret by ratio of communication to computing", &summary.by_ratio),
    ];
    for (file, title, groups) in groups {
        files::write(&target.join(format!("{file}.svg")), &plot::groups(title, groups))?;
    }
    let of_runs = [
        ("experiments", plot::experiments(records)),
        ("reaction", plot::reactions(records)),
        ("prediction", plot::predictions(records)),
    ];
    for (file, chart) in of_runs {
        files::write(&target.join(format!("{file}.svg")), &chart)?;
    }
    for record in records {
        files::write(&target.join("cells").join(format!("{}.svg", record.name)), &plot::timeline(record))?;
    }
    Ok(summary)
}

/// Results that make one table.
#[derive(Debug, PartialEq)]
pub struct Results {
    /// Of the cells that ran to their end, by name.
    pub records: Vec<Record>,
    /// The others, with what is missing.
    pub incomplete: Vec<String>,
    /// Of the program whose decisions they show.
    pub binary: String,
}

/// The results of a folder, if they are of these cells, of this truth with the library's curves, and of one program.
///
/// # Errors
/// No results; a cell that is none of `cells` or differs from it; one of another truth or of other curves, or whose curves are missing; two
/// programs. Each names the cell and what to do.
pub fn read(folder: &Path, cells: &[Cell], truth: &Coefficients, library: &Library) -> Result<Results> {
    let records = run::read_records(folder)?;
    let again = |name: &str| {
        format!(
            "run it again (`./dev suite --only {name}` with the same --cells, --truth, --curves and --target), or remove {}",
            path_of(folder, name).display()
        )
    };
    one_table(records, cells, truth, library, again)
}

/// The recorded planner's runs as results, from a folder of baselines. Cells without any are incomplete.
///
/// # Errors
/// As of [`read`].
pub fn recorded(folder: &Path, cells: &[Cell], truth: &Coefficients, library: &Library) -> Result<Results> {
    let (mut records, mut lacking) = (Vec::new(), Vec::new());
    for cell in cells {
        let kept: Option<Baselines> = files::read_json_if_there(&path_of(folder, &cell.name))?;
        let mut baselines = kept.unwrap_or_default();
        let Some(RecordedPlanner { commit, binary, runs }) = baselines.recorded_planner.take() else {
            lacking.push(format!("{} (no recorded planner)", cell.name));
            continue;
        };
        records.push(Record {
            name: cell.name.clone(),
            cell: cell.clone(),
            seeds: runs.iter().map(|run| run.seed).collect(),
            baselines,
            binary: format!("{binary} of commit {commit}"),
            flexcomm: runs,
            error: None,
        });
    }
    ensure!(
        !records.is_empty(),
        "{} has no recorded planner; `flexcomm-suite record --planner` keeps one",
        folder.display()
    );
    let again = |name: &str| {
        format!(
            "run that planner again and `record --planner` (suite/README.md: the recorded planner), or remove {}",
            path_of(folder, name).display()
        )
    };
    let mut results = one_table(records, cells, truth, library, again)?;
    results.incomplete.extend(lacking);
    Ok(results)
}

/// `again` says what helps against results of a cell that do not belong to the others.
fn one_table(
    mut records: Vec<Record>,
    cells: &[Cell],
    truth: &Coefficients,
    library: &Library,
    again: impl Fn(&str) -> String,
) -> Result<Results> {
    let mut incomplete = Vec::new();
    for record in &records {
        let name = &record.name;
        let again = again(name);
        let cell = cells.iter().find(|cell| cell.name == *name);
        let cell =
            cell.with_context(|| format!("{name} is none of the cells: name their folder with --cells, or {again}"))?;
        ensure!(record.is_of(cell), "the results of {name} are of another cell of that name: {again}");
        let digest = digests::baselines_digest(library, truth, cell, &record.baselines.seeds)?;
        let digest = digest.with_context(|| {
            format!("the curves of {name} are missing: name their folder with --curves, or {again}")
        })?;
        ensure!(
            digest == record.baselines.digest,
            "the results of {name} are of another truth or of other curves: {again}"
        );
        let first = &records[0];
        ensure!(
            record.binary == first.binary,
            "the results of {name} are of the program {}, those of {} of {}: one table is of one program; {again}",
            record.binary,
            first.name,
            first.binary
        );
    }
    let binary = records[0].binary.clone();
    records.retain(|record| {
        let missing = missing(record);
        incomplete.extend(missing.iter().map(|missing| format!("{} ({missing})", record.name)));
        missing.is_none()
    });
    Ok(Results { records, incomplete, binary })
}

/// What a cell lacks that has not run to its end.
fn missing(record: &Record) -> Option<String> {
    let lack = |runs: &[Adapted], seeds: &[u64]| {
        record.seeds.iter().copied().find(|seed| seeds.contains(seed) && runs.iter().all(|run| run.seed != *seed))
    };
    let baselines = &record.baselines;
    // Seeds that were added for a narrower interval have no run by chance.
    let runs = [
        ("flexcomm", lack(&record.flexcomm, &record.seeds)),
        ("oracle", lack(&baselines.oracle, &record.seeds)),
        ("random", lack(&baselines.random, &baselines.seeds)),
    ];
    runs.into_iter().find_map(|(who, seed)| Some(format!("no run of {who} with seed {}", seed?)))
}

impl Record {
    /// Runs with the seeds that it is of: results keep those with others, too.
    pub(crate) fn of_its_seeds<'a>(&'a self, runs: &'a [Adapted]) -> impl Iterator<Item = &'a Adapted> {
        runs.iter().filter(|run| self.seeds.contains(&run.seed))
    }

    /// Flexcomm's.
    pub(crate) fn runs(&self) -> impl Iterator<Item = &Adapted> {
        self.of_its_seeds(&self.flexcomm)
    }

    /// What each of its runs without an error spent on live trials and lost by shadow trials, of the time to the target as it counts.
    pub(crate) fn live_and_shadow(&self) -> Vec<(f64, f64)> {
        let share = |run: &Adapted| {
            let counted = self.baselines.counted(run.seed, run.seconds).filter(|seconds| *seconds > 0.0)?;
            Some((run.experiments.seconds / counted, run.experiments.shadow_seconds / counted))
        };
        self.runs().filter(|run| run.error.is_none()).filter_map(share).collect()
    }

    /// Whether it is of that cell as it is now.
    pub(crate) fn is_of(&self, cell: &Cell) -> bool {
        self.name == cell.name && Cell { name: cell.name.clone(), ..self.cell.clone() } == *cell
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fixed::{self, Curve, Curves, Shared};
    use crate::summary::tests::record as made;
    use std::collections::BTreeMap;
    use std::sync::Arc;
    use tempfile::TempDir;

    /// Results of a few cells, with curves that are made up.
    struct World {
        folder: TempDir,
        cells: Vec<Cell>,
        truth: Coefficients,
    }

    impl World {
        fn new() -> Self {
            let mut world =
                Self { folder: tempfile::tempdir().unwrap(), cells: Vec::new(), truth: Coefficients::frozen() };
            for name in ["a-1", "b-1"] {
                let record = made(name, "a", 60.0, 50.0, Some(100.0));
                world.cells.push(Cell { name: name.into(), seeds: vec![1], ..record.cell });
            }
            let recipe = world.cells[0].recipe(1);
            let curve =
                |(setting, _)| Curve { setting, losses: vec![2.0], accuracy: 0.9, rounds: Vec::new(), diverged: false };
            let curves = fixed::settings(recipe.momentum).into_iter().map(curve).collect();
            Curves { recipe, curves }.write(&world.path("curves")).unwrap();
            for cell in world.cells.clone() {
                world.keep(&cell, &|_| ());
            }
            world
        }

        fn path(&self, name: &str) -> std::path::PathBuf {
            self.folder.path().join(name)
        }

        fn library(&self) -> Library {
            Library::new(self.path("curves"), self.path("trained"), Shared::synthetic(&[]), Arc::default())
        }

        fn keep(&self, cell: &Cell, change: &dyn Fn(&mut Record)) {
            let mut record = made(&cell.name, "a", 60.0, 50.0, Some(100.0));
            record.cell = cell.clone();
            let digest = digests::baselines_digest(&self.library(), &self.truth, cell, &[1]).unwrap();
            record.baselines.digest = digest.unwrap();
            change(&mut record);
            files::write_json(&self.path("results").join(format!("{}.json", cell.name)), &record).unwrap();
        }

        fn read(&self) -> Result<Results> {
            read(&self.path("results"), &self.cells, &self.truth, &self.library())
        }
    }

    #[test]
    fn results_are_read_and_shown_as_after_a_run() {
        let world = World::new();
        let Results { records, incomplete, binary } = world.read().unwrap();
        assert_eq!((records.len(), binary.as_str(), incomplete.len()), (2, "a", 0));
        let provenance = Provenance { digest: "d".into(), frozen: true, binary, incomplete };
        let summary = write(&world.path(""), &records, provenance.clone()).unwrap();
        assert_eq!(summary, Summary::new(&records, provenance));
        let kept: Summary = files::read_json(&world.path("summary.json")).unwrap();
        assert_eq!(kept.binary, "a");
        for name in ["regret-by-family", "experiments", "reaction", "prediction", "cells/a-1", "cells/b-1"] {
            assert!(world.path(&format!("{name}.svg")).exists(), "{name}");
        }
    }

    #[test]
    fn the_recorded_planner_is_shown_from_the_baselines() {
        let world = World::new();
        let baselines = world.path("baselines");
        let recorded = || recorded(&baselines, &world.cells, &world.truth, &world.library());
        let error = format!("{:#}", recorded().unwrap_err());
        assert!(error.contains("baselines has no recorded planner"), "{error}");
        let keep = |at: usize, commit: Option<&str>| {
            let Results { records, .. } = world.read().unwrap();
            let Record { name, baselines: kept, flexcomm: runs, binary, .. } = records[at].clone();
            let recorded_planner = commit.map(|commit| RecordedPlanner { commit: commit.into(), binary, runs });
            files::write_json(&baselines.join(format!("{name}.json")), &Baselines { recorded_planner, ..kept })
                .unwrap();
        };
        keep(0, Some("abc"));
        keep(1, None);
        let results = recorded().unwrap();
        assert_eq!(
            (results.binary.as_str(), results.incomplete),
            ("a of commit abc", vec!["b-1 (no recorded planner)".to_owned()])
        );
        let [record] = &results.records[..] else { panic!("one cell has one") };
        assert_eq!(
            (&record.flexcomm, record.baselines.recorded().len()),
            (&world.read().unwrap().records[0].flexcomm, 0)
        );
        keep(1, Some("def"));
        let error = format!("{:#}", recorded().unwrap_err());
        assert!(
            error.contains(
                "the results of b-1 are of the program a of commit def, those of a-1 of a of commit abc: one table"
            ) && error.contains("`record --planner`"),
            "{error}"
        );
    }

    #[test]
    fn results_that_make_no_one_table_are_refused() {
        let refused = |change: &dyn Fn(&mut World)| {
            let mut world = World::new();
            change(&mut world);
            format!("{:#}", world.read().unwrap_err())
        };
        let error = refused(&|world| world.keep(&world.cells[1].clone(), &|record| record.binary = "z".into()));
        assert!(error.contains("the results of b-1 are of the program z, those of a-1 of a"), "{error}");
        assert!(error.contains("`./dev suite --only b-1`") && error.contains("results/b-1.json"), "{error}");
        let error = refused(&|world| world.cells[0].compute_s *= 2.0);
        assert!(error.contains("the results of a-1 are of another cell of that name: run it again"), "{error}");
        let error = refused(&|world| world.cells.truncate(1));
        assert!(error.contains("b-1 is none of the cells: name their folder with --cells"), "{error}");
        let error = refused(&|world| world.truth.tcp.timeout_s = 0.3);
        assert!(error.contains("the results of a-1 are of another truth or of other curves"), "{error}");
        let error = refused(&|world| std::fs::remove_dir_all(world.path("curves")).unwrap());
        assert!(error.contains("the curves of a-1 are missing"), "{error}");
        let error = refused(&|world| std::fs::remove_dir_all(world.path("results")).unwrap());
        assert!(error.contains("results has no results; `./dev suite` makes them"), "{error}");
    }

    /// Where this fails, cells, curves or the truth differ from those that suite/baselines are of: run all cells, `record` and `freeze`.
    #[test]
    fn the_repository_has_baselines_of_its_cells_and_truth() {
        let suite = |name: &str| Path::new(env!("CARGO_MANIFEST_DIR")).join(name);
        let (cells, truth) = (Cell::read_all(&suite("cells")).unwrap(), Coefficients::frozen());
        let frozen: BTreeMap<String, String> = files::read_json(&suite("frozen.json")).unwrap();
        assert_eq!(digests::frozen_digest(&cells, &truth).unwrap(), frozen["digest"]);
        let library = Library::new(suite("curves"), suite("curves"), Shared::synthetic(&[]), Arc::default());
        for cell in &cells {
            let kept: Baselines = files::read_json(&path_of(&suite("baselines"), &cell.name)).unwrap();
            let digest = digests::baselines_digest(&library, &truth, cell, &cell.seeds).unwrap();
            assert_eq!(digest, Some(kept.digest), "{}", cell.name);
            assert_eq!((kept.oracle.len(), kept.random.len()), (cell.seeds.len(), cell.seeds.len()), "{}", cell.name);
        }
        recorded(&suite("baselines"), &cells, &truth, &library).unwrap();
    }

    #[test]
    fn cells_that_are_not_whole_are_left_out_and_told() {
        let world = World::new();
        let lack = |change: &dyn Fn(&mut Record)| {
            world.keep(&world.cells[1], change);
            let Results { records, incomplete, .. } = world.read().unwrap();
            assert!(records.len() == 1 && records[0].name == "a-1");
            incomplete
        };
        assert_eq!(lack(&|record| record.flexcomm.clear()), ["b-1 (no run of flexcomm with seed 1)"]);
        assert_eq!(lack(&|record| record.baselines.random.clear()), ["b-1 (no run of random with seed 1)"]);
        assert_eq!(lack(&|record| record.baselines.oracle[0].seed = 2), ["b-1 (no run of oracle with seed 1)"]);
        // A seed that was added has none by chance, and what ended with an error is there.
        let added = |record: &mut Record| {
            record.seeds.push(2);
            let mut second = record.flexcomm[0].clone();
            (second.seed, second.error) = (2, Some("broken".into()));
            record.baselines.oracle.push(second.clone());
            record.flexcomm.push(second);
        };
        world.keep(&world.cells[1], &added);
        assert_eq!(world.read().unwrap().records.len(), 2);
    }
}
