"""`python -m qeffect.torchtitan --job.config_file x.toml ...`: TorchTitan's training program, its pipeline under
contract. Under torchrun, as TorchTitan's own."""
import sys

_FLAG = "--job.custom_config_module"

if __name__ == "__main__":
    given = [argument.split("=")[0].replace("-", "_") for argument in sys.argv[1:]]
    if _FLAG.replace("-", "_") not in given:
        sys.argv.append(f"{_FLAG}=qeffect.torchtitan.config")  # TorchTitan looks at its arguments when it is imported
    from qeffect.errors import UnsupportedError
    try:
        from qeffect.torchtitan.train import main
    except UnsupportedError as missing:
        sys.exit(f"qeffect.torchtitan: {missing}")
    main()
