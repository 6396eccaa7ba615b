"""FedEmbed's speaker preferences by one command: Tables 3 and 5, the confusion matrices of Figure 5.

    python benchmarks/fedembed/voice.py --out runs/fedembed-voice

Synthesises the speech if it does not exist yet (about three minutes; `bespoke data voice-preferences` lists what is
needed; privacy needs `pip install 'bespoke-fl[privacy]'`). Then it makes a comparison folder for balanced and for
imbalanced users, without privacy and with it (voice_gaussian.toml); every folder has its report.html. Finished folders
are kept, so the command continues where it was stopped.
"""

from preferences import HERE, Experiment

from bespoke.cli.exit_codes import program

VOICE = Experiment("voice", "table3", privacy=HERE / "voice_gaussian.toml")

if __name__ == "__main__":
    program(lambda: VOICE.run(VOICE.arguments(__doc__)))
