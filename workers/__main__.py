"""`python -m workers`: the same as `penstock`."""

if __name__ == "__main__":
    from workers.cli import main

    main()
